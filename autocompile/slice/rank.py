"""One rank of a slice: build, apply knobs, compile, warm up, measure, check.

``python -m autocompile.slice.rank FOLDER`` is one of several, as torch's launcher starts them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch.optim import Optimizer

from autocompile.knobs import Setup, apply_config
from autocompile.records import (
    Degradation,
    Failed,
    Measured,
    Measurement,
    Outcome,
    Stage,
    Telemetry,
)
from autocompile.slice.classify import classify
from autocompile.slice.copies import CopyMaker
from autocompile.slice.cycles import (
    Cycle,
    Waited,
    cycles,
    evaluation,
    steps_of_an_epoch,
    steps_to_all_shapes,
    tokens_of_cycles,
)
from autocompile.slice.environment import environment
from autocompile.slice.gpu_state import opened
from autocompile.slice.group import ALONE, Group, joined
from autocompile.slice.locking import gpu_locks
from autocompile.slice.measure import RecompileStorm, Stepper, Window, steady_window, warm_up
from autocompile.slice.merge import RankOutcome
from autocompile.slice.numerics import check, copied_layers, require_close
from autocompile.slice.parity import Reference, compare, dropout_off, eager_reference, require_finite
from autocompile.slice.process import begin, end_when_orphaned, limit_compile_threads
from autocompile.slice.profiling import profiled_kernels
from autocompile.slice.progress import Reporter
from autocompile.slice.telemetry import CompileObserver
from autocompile.slice.warned import recorded_warnings, with_reasons
from autocompile.slice_plan import slice_plan
from autocompile.spec import MeasureRequest, gradient_accumulation
from autocompile.values import write_aside
from autocompile.workloads.job import Context, Job, prepare
from autocompile.workloads.parallel import EngineStep, setup_of, wrapped

_LOSSES_KEPT = 32

log = logging.getLogger("autocompile.slice")


@dataclass
class _Run:
    """What exists so far of one slice; telemetry is made from it, whether the slice ends well or not."""

    request: MeasureRequest
    reporter: Reporter
    observer: CompileObserver
    device: torch.device
    group: Group = ALONE
    job: Job | None = None
    parameters: int = 0
    setup: Setup | None = None
    kernels: tuple[str, ...] = ()
    recompiles_in_window: int | None = None
    telemetry: Telemetry | None = None  # as it was when the measurement was made
    warnings: list[str] = field(default_factory=list)


def answered(request: MeasureRequest, folder: Path, rank: int = 0) -> RankOutcome:
    """What this rank found, also in ``rank<k>.json``; the first one's progress is the slice's."""
    progress = folder / (f"progress{rank}.json" if rank else "progress.json")
    device = torch.device("cuda", rank) if _on_gpu(request) else torch.device("cpu")
    with Reporter(progress, device) as reporter:
        outcome = run_rank(request, reporter, device, rank)
    found = RankOutcome(rank=rank, time=time.time(), outcome=outcome)
    write_aside(folder / f"rank{rank}.json", found.model_dump_json())
    return found


def run_rank(request: MeasureRequest, reporter: Reporter, device: torch.device, rank: int) -> Outcome:
    """Measure one config; every exception becomes a `Failed` with the telemetry gathered until then."""
    with CompileObserver() as observer, ExitStack() as stack:
        run = _Run(request=request, reporter=reporter, observer=observer, device=device)
        stack.enter_context(recorded_warnings(run.warnings))
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            if device.type == "cuda" and rank == 0:
                stack.enter_context(gpu_locks(request.workload.gpus_per_trial))
            if request.workload.gpus_per_trial > 1:
                run.group = joined(device, deadline_seconds=request.deadline_seconds)
            measurement = _measured(run)
            _check_numerics(run)
            run.group.any(False)  # the first one's locks are for all of them
        except Exception as error:  # noqa: BLE001  the process ends here; whatever it was, the parent wants its name
            failure = classify(error, stage=reporter.stage, memory_share=reporter.memory_share())
            return Failed(failure=with_reasons(failure, run.warnings), telemetry=_telemetry(run))
        return Measured(measurement=measurement, telemetry=_telemetry(run))


def _measured(run: _Run) -> Measurement:
    began = time.perf_counter()
    request, reporter = run.request, run.reporter
    reporter.enter(Stage.BUILD)
    run.job = job = prepare(_context(run), request.workload)
    n_micro_batches = gradient_accumulation(request.workload, request.config)
    batches = cycles(job, n_micro_batches)
    first = next(batches)
    run.parameters = sum(parameter.numel() for parameter in job.model.parameters())
    eager = eager_reference(job, first, request.seed)
    _forget_peaks(run.device)
    reporter.enter(Stage.APPLY)
    optimizer = _configured(run, job)
    stepper = _stepper(run, itertools.chain([first], batches), optimizer)
    setup_seconds = time.perf_counter() - began

    reporter.enter(Stage.COMPILE)
    losses = [_first_step(run, stepper, eager)]
    reporter.enter(Stage.WARMUP)
    losses += warm_up(stepper, slice_plan(request.role))
    gc.collect()
    gc.freeze()  # what the build left behind need not be looked at again inside the window

    reporter.enter(Stage.MEASURE)
    window = _window(run, stepper)
    reporter.enter(Stage.CHECK)
    losses += window.losses
    require_finite(losses)
    n = window.step_seconds.n
    before = len(losses) - n
    tokens = tokens_of_cycles(job, n_micro_batches, before=before, n=n, passed=reporter.stepped)
    flops = eager.flops if stepper.shape_steps <= 1 else None  # counted on the first cycle, whose shape is one of many
    measurement = _measurement(run, window, tokens=tokens, flops=flops, setup_seconds=setup_seconds)
    run.kernels = profiled_kernels(stepper)
    return measurement.model_copy(update={"losses": tuple(losses[:_LOSSES_KEPT])})


def _configured(run: _Run, job: Job) -> Optimizer:
    """The job with all knobs, as its ranks train it; what is sharded now was whole before, and forgotten."""
    request = run.request
    run.setup = setup = apply_config(setup_of(job, request.workload), request.config)
    run.observer.groups = setup.groups
    n_micro_batches = gradient_accumulation(request.workload, request.config)
    ranks = wrapped(job, setup, n_micro_batches=n_micro_batches)
    run.job = ranks.job
    _forget_peaks(run.device)
    return ranks.optimizer


def _check_numerics(run: _Run) -> None:
    """The timed model goes first, so that there is room for copies of it; they compile too, which is not telemetry."""
    assert run.job is not None
    run.telemetry = _telemetry(run)
    if isinstance(run.job.train_step, EngineStep):
        run.job.model.destroy()  # type: ignore[operator]
    run.job = run.setup = None
    make = CopyMaker(
        request=run.request,
        device=run.device,
        layers=copied_layers(run.request.fidelity.layers, run.parameters),
        stepped=run.reporter.stepped,
        group=run.group,
    )
    numerics = check(make, observer=run.observer, reporter=run.reporter)
    run.telemetry = run.telemetry.model_copy(update={"numerics": numerics})
    if numerics is not None:
        require_close(numerics)


def _context(run: _Run) -> Context:
    request = run.request
    ctx = Context.of(
        request.workload, request.config, device=run.device, seed=request.seed, depth=request.fidelity.layers
    )
    return ctx.of_rank(run.group.rank)


def _forget_peaks(device: torch.device) -> None:
    """Neither the build nor the eager forward before the knobs is the config's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _window(run: _Run, stepper: Stepper) -> Window:
    before = run.observer.n_recompiles()
    try:
        found = steady_window(stepper, slice_plan(run.request.role))
    except RecompileStorm:
        run.recompiles_in_window = run.observer.n_recompiles() - before
        raise
    run.recompiles_in_window = 0  # with a compile inside it would be void
    return found


def _on_gpu(request: MeasureRequest) -> bool:
    return request.workload.device == "cuda" or (request.workload.device is None and torch.cuda.is_available())


def _stepper(run: _Run, batches: Iterator[Cycle], optimizer: Optimizer) -> Stepper:
    assert run.job is not None
    job, device, fed = run.job, run.device, Waited(batches, run.device)
    n_micro_batches = gradient_accumulation(run.request.workload, run.request.config)
    shape_steps = steps_to_all_shapes(job, n_micro_batches)

    def step() -> torch.Tensor:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        loss = job.train_step(job.model, next(fed), optimizer)
        return torch.as_tensor(loss).detach().clone()  # a CUDA graph owns its output

    unequal = shape_steps > 1 or run.request.workload.lengths is not None  # padded alike they still hold other tokens
    return Stepper(
        step=step,
        evaluate=evaluation(job, device) if run.request.workload.eval_every else None,
        eval_every=run.request.workload.eval_every or 1,
        watch=run.observer,
        device=device,
        stepped=run.reporter.stepped,
        waited_seconds=fed.seconds,
        shape_steps=shape_steps,
        epoch_steps=steps_of_an_epoch(job, n_micro_batches) if unequal else 1,
        nvml=opened(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None,
        group=run.group,
    )


def _first_step(run: _Run, stepper: Stepper, eager: Reference) -> float:
    """The first step with dropout off, so that its loss can be compared with eager's.

    A model with dropout starts to compile anew when it is back on, as if nothing had been compiled before: with the
    old entries dynamo would take the changed probability for a symbol.
    """
    assert run.job is not None
    torch.manual_seed(run.request.seed)
    with dropout_off(run.job.model) as had_dropout:
        first = float(stepper.step())
    compare(first, eager)
    if had_dropout:
        torch._dynamo.reset()
        run.observer.restart()
    stepper.stepped()
    return first


def _measurement(
    run: _Run, window: Window, *, tokens: list[int], flops: float | None, setup_seconds: float
) -> Measurement:
    """``tokens`` are those of each cycle, ``flops`` those of one.

    Cycles of one size are told by their median, which a hiccup does not move; of several sizes only the sum of all
    tokens over the sum of all seconds is a speed.
    """
    assert run.job is not None
    seconds = window.step_seconds
    typical = seconds.median if min(tokens) == max(tokens) else window.mean_seconds
    on_gpu = run.device.type == "cuda"
    free, total = torch.cuda.mem_get_info(run.device) if on_gpu else (0, 0)
    telemetry = _telemetry(run)
    return Measurement(
        tokens_per_second=fmean(tokens) / typical,
        unit=run.job.unit,
        step_seconds=seconds,
        compile=run.observer.compile_cost(),
        setup_seconds=setup_seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(run.device) if on_gpu else _peak_resident_bytes(),
        reserved_memory_bytes=torch.cuda.max_memory_reserved(run.device) if on_gpu else None,
        device_memory_bytes=total - free if on_gpu else None,
        model_flops_per_second=flops / seconds.median if flops else None,
        data_wait_seconds=window.data_wait_seconds,
        eval_seconds=window.eval_seconds,
        gpu=window.gpu,
        degraded=(*_degradations(run, telemetry), *window.flags),
    )


def _peak_resident_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _degradations(run: _Run, telemetry: Telemetry) -> tuple[Degradation, ...]:
    wanted_compile = run.request.config["scope"] != "none"
    found: list[Degradation] = []
    if wanted_compile and telemetry.compile_applied != "all":
        found.append("partial_eager")
    if telemetry.cudagraph_skips:
        found.append("cudagraph_skipped")
    if telemetry.graph_breaks:
        found.append("graph_breaks")
    return tuple(found)


def _telemetry(run: _Run) -> Telemetry:
    if run.telemetry is not None:
        return run.telemetry
    seen = run.observer.telemetry(run.setup)
    return seen.model_copy(
        update={
            "mask": run.job.mask if run.job else None,
            "recompiles_in_window": run.recompiles_in_window,
            "sdpa_kernels": run.kernels,
            "environment": environment(run.device, run.request.workload),
        }
    )


def main(folder: Path) -> int:
    """The exit status: torch's launcher ends the other ranks where one of them has failed."""
    end_when_orphaned()
    request = begin(folder)
    assert isinstance(request, MeasureRequest)
    ranks = request.workload.gpus_per_trial
    limit_compile_threads(request.compile_threads or max(1, (torch._inductor.config.compile_threads or 1) // ranks))
    if not _on_gpu(request):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    found = answered(request, folder, int(os.environ["RANK"]))
    if isinstance(found.outcome, Failed):
        return 1
    dist.barrier()  # who leaves first closes connections that the others still use
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
