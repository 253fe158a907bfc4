"""Load a user's workload, FILE.py:FUNCTION, and say in one line what is wrong with it and where."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autocompile.spec import WorkloadSpec
from autocompile.workloads.batches import first_batch
from autocompile.workloads.job import Context, Job, MachineFault, WorkloadError, trainable
from autocompile.workloads.training import tensors

_BATCHES_COMPARED = 2
MICRO_BATCHES = (2, 4)  # two sizes to compare; not 1, with which batch normalisation cannot train


def build(ctx: Context, workload: WorkloadSpec) -> Job:
    """What the user's function builds. Raises WorkloadError for all that can be wrong with it."""
    assert workload.script is not None
    path, function = _located(workload.script)
    module = _imported(path)
    made = getattr(module, function, None)
    if not callable(made):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise WorkloadError(f"{path.name}: it has no function {function}; it has {', '.join(names) or 'none'}")
    with blamed_on(path.parent, f"{path.name}: {function}"):
        job = made(ctx)
        if workload.trainer:
            job = _of_trainer(job, ctx)
    if complaint := _complaint(job):
        where = f"{path.name}:{made.__code__.co_firstlineno}" if isinstance(made, types.FunctionType) else None
        raise WorkloadError(f"{path.name}: {function}: {complaint}", where=where)
    assert isinstance(job, Job)
    return job


def _of_trainer(trainer: object, ctx: Context) -> Job:
    from transformers import Trainer

    from autocompile.workloads.trainers import job_of

    if not isinstance(trainer, Trainer):
        raise WorkloadError(f"expected it to return a transformers.Trainer, found {type(trainer).__name__}")
    return job_of(trainer, ctx)


def _complaint(job: object) -> str | None:
    """What is wrong with what a script returned, before any of it runs."""
    if not isinstance(job, Job):
        return f"expected it to return an autocompile.Job, found {type(job).__name__}"
    model: object = job.model
    if not isinstance(model, nn.Module):
        return f"model: expected a torch.nn.Module, found {type(model).__name__}"
    for name in ("loss", "batches", "optimizer", "train_step", "tokens"):
        if not callable(getattr(job, name)):
            return f"{name}: expected a function, found {type(getattr(job, name)).__name__}"
    if not trainable(job.model):
        return "model: expected parameters that need gradients, found none"
    compiled = [name for name, module in job.model.named_modules() if _is_compiled(module)]
    if compiled:
        where = f"its part {compiled[0]}" if compiled[0] else "it"
        return f"model: {where} is compiled already; return it as it is, since compile is what is tuned"
    return None


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module), whose class dynamo's import would cost seconds to name, or by module.compile()."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def check_batches(job: Job, script: str) -> None:
    """Begun twice, the stream must give the same batches: what is counted and compared is a stream of its own."""
    path, function = _located(script)
    with blamed_on(path.parent, f"{path.name}: {function}: batches"):
        first, second = (list(itertools.islice(job.batches(), _BATCHES_COMPARED)) for _ in range(2))
    where = f"{path.name}: {function}: batches()"
    if len(second) < max(1, len(first)):  # one was there when the job was made
        raise WorkloadError(f"{where} gave {len(second)} batches when begun again; it should start anew each time")
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if not _same(one, other):
            raise WorkloadError(
                f"{where}: batch {number} differs when begun again with the same seed; draw it from a generator that "
                "batches() seeds with ctx.seed"
            )


def check_loss(job: Job, script: str) -> None:
    """One forward on the first batch: the loss must be one number, and must lead back to what is trained."""
    path, function = _located(script)
    with blamed_on(path.parent, f"{path.name}: {function}"):
        loss: Any = job.loss(job.model, first_batch(job))
    found = type(loss).__name__
    if isinstance(loss, Tensor):
        if loss.numel() == 1 and loss.requires_grad:
            return
        found = f"a tensor of shape {tuple(loss.shape)}" if loss.numel() != 1 else "one that needs no gradient"
    raise WorkloadError(f"{path.name}: {function}: loss: expected a scalar tensor that needs a gradient, found {found}")


def counted(job: Job, batch: Any, script: str) -> int:
    """Tokens or samples of a batch, as throughput counts them; none at all is a mistake."""
    path, function = _located(script)
    with blamed_on(path.parent, f"{path.name}: {function}: tokens"):
        found = int(job.tokens(batch))
    if found < 1:
        kind = type(batch).__name__
        raise WorkloadError(
            f"{path.name}: {function}: counted nothing in a batch ({kind}): give the Job a tokens(batch)"
        )
    return found


def frozen_knobs(script: str, small: int, large: int) -> dict[str, str]:
    """Knobs that this workload does not follow, each with the reason, from its batch for each of MICRO_BATCHES."""
    if large > small:
        return {}
    few, many = MICRO_BATCHES
    return {"micro_batch": f"{script} gives batches of {small} for ctx.micro_batch={few} and of {large} for {many}"}


def _same(batch: Any, other: Any) -> bool:
    """By their tensors; NaN is itself."""
    found, wanted = list(tensors(batch)), list(tensors(other))
    return len(found) == len(wanted) and all(
        one.shape == two.shape and bool(torch.isclose(one, two, rtol=0, atol=0, equal_nan=True).all())
        for one, two in zip(found, wanted, strict=True)
    )


def _located(script: str) -> tuple[Path, str]:
    file, colon, function = script.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise WorkloadError(f'workload: expected FILE.py:FUNCTION, found "{script}"')
    path = Path(file).resolve()
    if not path.is_file():
        raise WorkloadError(f"workload: there is no file {file}")
    return path, function


def _imported(path: Path) -> types.ModuleType:
    """The script as a module of a name of its own, so that it hides no module of the same name."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"autocompile_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up here
    with blamed_on(path.parent, f"{path.name}: importing it failed"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def blamed_on(folder: Path, what: str) -> Iterator[None]:
    """Users' code may raise anything: one line with the place in their folder. Out of memory is no fault of it."""
    try:
        yield
    except (WorkloadError, MachineFault, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        detail = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        raise WorkloadError(f"{what}: {detail}", where=_place(error, folder)) from error


def _place(error: BaseException, folder: Path) -> str | None:
    """The deepest file:line of the traceback inside the user's folder; of a syntax error the line it is on."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    for filename, line in reversed(frames):
        if Path(filename).is_relative_to(folder):
            return f"{Path(filename).relative_to(folder)}:{line}"
    return None
