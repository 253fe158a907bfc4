"""A study's first and last acts: the preflight's facts, creating it or making sure it is this one, its files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from autocompile.best_file import save
from autocompile.errors import MachineError, UserError
from autocompile.executors import Executor
from autocompile.executors.exits import BUDGET
from autocompile.failure_texts import CACHE_FOLDER
from autocompile.records import Failed, FailureKind, Stage
from autocompile.search import candidates
from autocompile.spec import Device, Facts, PreflightRequest, StudySpec, WorkloadSpec
from autocompile.tuner.events import StudyResult
from autocompile.tuner.folders import cache_root, copy_seed, seed_folder, spare_folder
from autocompile.tuner.leftovers import WORKPLACE, in_use
from autocompile.tuner.slices import machine_failure
from autocompile.values import write_aside

if TYPE_CHECKING:
    from autocompile.storage import Storage

PREFLIGHT_SECONDS = 300.0  # a bare CPU spends most of a minute on torch's probes of the compiler
_DIFFERENCES_SHOWN = 8


def preflight(spec: StudySpec, executor: Executor, *, folder_root: Path, devices: Sequence[int] = ()) -> Facts:
    """What this machine and this workload are, from a child; nothing is written but the seed of compile caches.

    ``devices`` are the GPUs to look at, all if empty. UserError with the child's message where the workload is to
    blame, MachineError for all else.
    """
    deadline = min(PREFLIGHT_SECONDS, spec.budget.seconds or PREFLIGHT_SECONDS)
    request = PreflightRequest(
        workload=spec.workload,
        seed=spec.seed,
        devices=tuple(devices),
        deadline_seconds=deadline,
        cache_folder="",
    )
    seed = seed_folder(spec, folder_root)
    answer = _answered(executor, request, seed)
    if isinstance(answer, Failed) and answer.failure.subkind == CACHE_FOLDER:
        again = _answered(executor, request, spare_folder(seed))
        if isinstance(again, Failed) and again.failure.subkind == CACHE_FOLDER:
            raise MachineError(f"{answer.failure.message}; {again.failure.message}")
        answer = again
    if isinstance(answer, Facts):
        return answer
    failure = answer.failure
    if failure.kind is FailureKind.WORKLOAD_ERROR:
        raise UserError(f"{failure.message} ({failure.where})" if failure.where else failure.message)
    if failure.subkind == BUDGET and deadline < PREFLIGHT_SECONDS:
        limit = f"its {deadline:.0f} s (stage {failure.stage})"
        raise UserError(f"budget: checking machine and workload took longer than {limit}; give more")
    if failure.subkind == BUDGET and failure.stage is Stage.COMPILE:
        raise MachineError(f"compiling two lines did not end: {failure.message}; look at the compiler (CXX, CC)")
    raise MachineError(failure.message)


def _answered(executor: Executor, request: PreflightRequest, seed: Path) -> Failed | Facts:
    """The preflight's answer with its caches where these will lie; on a CPU it leaves them as the seed of others."""
    try:
        workplace = _workplace(seed.parent)
    except OSError as error:
        return machine_failure(f"cannot write where the caches shall lie: {error}", subkind=CACHE_FOLDER)
    with workplace as folder, in_use(Path(folder)):
        cache = seed if seed.is_dir() else Path(folder) / "seed"
        answer = executor.run(request.model_copy(update={"cache_folder": str(cache.absolute())}), Path(folder))
        if isinstance(answer, Facts) and answer.devices[0].type == "cpu":
            try:
                copy_seed(cache, seed)
            except OSError:  # the first slice there will say why, and those after it work in the spare one
                with suppress(OSError):
                    copy_seed(cache, spare_folder(seed))
    assert isinstance(answer, Failed | Facts)
    return answer


def _workplace(caches: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for the preflight on the disk where the caches will lie, which it checks; it does not remain.

    The system's own where that path holds a blank: torch cannot compile there for a CPU, which `open_study` explains.
    """
    near = next(path for path in (caches.absolute(), *caches.absolute().parents) if path.is_dir())
    parent = None if any(letter.isspace() for letter in str(near)) else near
    return tempfile.TemporaryDirectory(dir=parent, prefix=WORKPLACE, ignore_cleanup_errors=True)


def open_study(spec: StudySpec, *, name: str | None, storage: Storage, facts: Facts, folder_root: Path) -> str:
    """Create the study, or make sure that the one of this name asks and runs the same; its name.

    UserError with the differing fields where it is another study, or the same one on another machine.
    """
    if not candidates(spec, facts):
        raise UserError(
            "the search space holds no config for this workload: no micro-batch divides the global batch, "
            "or the model has no part of the scopes to compile"
        )
    name = name or study_name(spec, facts)
    _check_cache_root(spec, facts, folder_root / name)
    stored = storage.load(name)
    if stored is None:
        storage.create(name, spec, facts)
        write_study_files(folder_root / name, spec, facts)
        return name
    if stored.spec.hash() != spec.hash():
        found = differences(stored.spec.identity(), spec.identity())
        raise UserError(f"study {name} exists with another spec: {_shown(found)}; give --study another name")
    if stored.facts.environment != facts.environment:
        found = differences(stored.facts.environment, facts.environment)
        raise UserError(f"study {name} was measured in another environment: {_shown(found)}; give another --study")
    return name


def write_study_files(folder: Path, spec: StudySpec, facts: Facts) -> None:
    """spec.yaml and facts.json of a study; MachineError where the disk does not take them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_aside(folder / "spec.yaml", yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
        write_aside(folder / "facts.json", facts.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise MachineError(f"cannot write the study's files: {error}") from error


def write_result(result: StudyResult, folder: Path) -> None:
    """report.md, and best.yaml where anything was measured; MachineError where the disk does not take them."""
    try:
        if result.best is not None:
            save(result.best, folder / "best.yaml")
        write_aside(folder / "report.md", result.report())
    except OSError as error:
        raise MachineError(f"cannot write the study's files: {error}") from error


def _check_cache_root(spec: StudySpec, facts: Facts, folder: Path) -> None:
    """inductor splits g++'s command line at blanks, so every compile would fail and look like its config's fault."""
    root = cache_root(spec, folder).absolute()
    if facts.devices[0].type == "cpu" and any(letter.isspace() for letter in str(root)):
        raise MachineError(
            f"cache folder {root}: torch cannot compile for a CPU where the path holds a blank; "
            "start in another folder or set cache_root in the spec"
        )


def study_name(spec: StudySpec, facts: Facts) -> str:
    """``<model>-<method>-<gpu>-<8 hex of the spec's hash>``."""
    parts = (_source(spec.workload), str(facts.method), _machine(facts.devices[0]), spec.hash()[:8])
    return "-".join(_slug(part) for part in parts)


def differences(old: object, new: object, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path, old and new value of each leaf in which two plain JSON values differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield path, old, new


def _shown(found: Iterator[tuple[str, Any, Any]]) -> str:
    lines = list(dict.fromkeys(_difference(path, old, new) for path, old, new in found))
    more = len(lines) - _DIFFERENCES_SHOWN
    return "; ".join(lines[:_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _difference(path: str, old: object, new: object) -> str:
    if path.startswith("space.parameters."):
        knob = path.removeprefix("space.parameters.")
        was, now = _values(old), _values(new)
        return f"{knob} in the space was {was}, is now {now if now != was else 'the same with other conditions'}"
    if path == "workload" and isinstance(old, str):  # of the environment: a hash of the script
        return "the workload script has changed"
    return f"{path} was {old!r}, is now {new!r}"


def _values(blocks: object) -> str:
    """A parameter of a search space in short; its reasons and conditions would fill a screen."""
    if not isinstance(blocks, list):
        return "absent"
    return " or ".join(
        f"{block['low']}..{block['high']}" if "low" in block else ", ".join(map(str, block["choices"]))
        for block in blocks
    )


def _source(workload: WorkloadSpec) -> str:
    """A model by its name without the folder or owner before it; a script by its file and function."""
    if workload.model is not None:
        return Path(workload.model).name or workload.model
    assert workload.script is not None
    return Path(workload.script).name.replace(".py", "")


def _machine(device: Device) -> str:
    return "cpu" if device.type == "cpu" else device.name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "x"
