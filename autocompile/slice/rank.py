"""One rank of a slice: build, apply knobs, compile, warm up, measure, check."""

from __future__ import annotations

import gc
import itertools
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch._dynamo

from autocompile.knobs import Setup, apply_config
from autocompile.records import (
    Degradation,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Measurement,
    Outcome,
    Stage,
    StepSeconds,
    Telemetry,
)
from autocompile.slice.classify import classify
from autocompile.slice.environment import environment
from autocompile.slice.locking import gpu_lock
from autocompile.slice.measure import RecompileStorm, Stepper, steady_window, warm_up
from autocompile.slice.parity import Reference, compare, dropout_off, eager_reference, require_finite
from autocompile.slice.progress import Reporter
from autocompile.slice.telemetry import CompileObserver, sdpa_kernels
from autocompile.spec import MeasureRequest, gradient_accumulation, slice_plan
from autocompile.workloads.job import Context, Job, prepare, trainable

_LOSSES_KEPT = 32

log = logging.getLogger("autocompile.slice")


@dataclass
class _Run:
    """What exists so far of one slice; telemetry is made from it, whether the slice ends well or not."""

    request: MeasureRequest
    reporter: Reporter
    observer: CompileObserver
    device: torch.device
    job: Job | None = None
    setup: Setup | None = None
    kernels: tuple[str, ...] = ()
    recompiles_in_window: int | None = None
    warnings: list[str] = field(default_factory=list)


def run_rank(request: MeasureRequest, reporter: Reporter) -> Outcome:
    """Measure one config; every exception becomes a `Failed` with the telemetry gathered until then."""
    device = torch.device("cuda", 0) if _on_gpu(request) else torch.device("cpu")
    with CompileObserver() as observer, ExitStack() as stack:
        run = _Run(request=request, reporter=reporter, observer=observer, device=device)
        stack.enter_context(_recorded_warnings(run))
        try:
            if device.type == "cuda":
                stack.enter_context(gpu_lock(str(torch.cuda.get_device_properties(device).uuid)))
            measurement = _measured(run)
        except Exception as error:  # noqa: BLE001  the process ends here; whatever it was, the parent wants its name
            failure = classify(error, stage=reporter.stage, memory_share=reporter.memory_share())
            return Failed(failure=_with_reasons(failure, run.warnings), telemetry=_telemetry(run))
        return Measured(measurement=measurement, telemetry=_telemetry(run))


def _measured(run: _Run) -> Measurement:
    began = time.perf_counter()
    request, reporter = run.request, run.reporter
    reporter.enter(Stage.BUILD)
    run.job = job = prepare(_context(run), request.workload)
    n_micro_batches = gradient_accumulation(request.workload, request.config)
    batches = _cycles(job, n_micro_batches)
    first = next(batches)
    eager = eager_reference(job, first, request.seed)
    _forget_peaks(run.device)
    reporter.enter(Stage.APPLY)
    run.setup = apply_config(Setup(model=job.model, regions=job.regions), request.config)
    stepper = _stepper(run, itertools.chain([first], batches), job.optimizer(trainable(job.model)))
    setup_seconds = time.perf_counter() - began

    reporter.enter(Stage.COMPILE)
    losses = [_first_step(run, stepper, eager)]
    reporter.enter(Stage.WARMUP)
    losses += warm_up(stepper)
    gc.collect()
    gc.freeze()  # what the build left behind need not be looked at again inside the window

    reporter.enter(Stage.MEASURE)
    step_seconds, window_losses = _window(run, stepper)
    reporter.enter(Stage.CHECK)
    losses += window_losses
    require_finite(losses)
    tokens = _tokens_per_cycle(job, n_micro_batches, before=len(losses) - step_seconds.n, n=step_seconds.n)
    measurement = _measurement(run, step_seconds, tokens / step_seconds.median, setup_seconds)
    run.kernels = _profiled_kernels(stepper)
    return measurement.model_copy(update={"losses": tuple(losses[:_LOSSES_KEPT])})


def _context(run: _Run) -> Context:
    request = run.request
    return Context.of(
        request.workload,
        device=run.device,
        micro_batch=int(request.config["micro_batch"]),
        seed=request.seed,
        depth=request.fidelity.layers,
    )


def _forget_peaks(device: torch.device) -> None:
    """Neither the build nor the eager forward before the knobs is the config's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _window(run: _Run, stepper: Stepper) -> tuple[StepSeconds, list[float]]:
    before = run.observer.n_recompiles()
    try:
        found = steady_window(stepper, slice_plan(run.request.role))
    except RecompileStorm:
        run.recompiles_in_window = run.observer.n_recompiles() - before
        raise
    run.recompiles_in_window = 0  # with a compile inside it would be void
    return found


def _tokens_per_cycle(job: Job, n_micro_batches: int, *, before: int, n: int) -> float:
    """Mean over the cycles of the window, whose batches a fresh stream repeats; keeping them would cost memory."""
    cycles = itertools.islice(_cycles(job, n_micro_batches), before, before + n)
    return sum(job.tokens(batch) for cycle in cycles for batch in cycle) / n


def _on_gpu(request: MeasureRequest) -> bool:
    return request.workload.device == "cuda" or (request.workload.device is None and torch.cuda.is_available())


def _cycles(job: Job, n_micro_batches: int) -> Iterator[list[object]]:
    """The micro-batches of each optimizer step; the workload's stream begins again where it ends."""
    stream = itertools.chain.from_iterable(job.batches() for _ in itertools.count())
    while True:
        yield list(itertools.islice(stream, n_micro_batches))


def _stepper(run: _Run, batches: Iterator[list[object]], optimizer: torch.optim.Optimizer) -> Stepper:
    assert run.job is not None
    job = run.job

    def step() -> torch.Tensor:
        if run.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        loss = job.train_step(job.model, next(batches), optimizer)
        return torch.as_tensor(loss).detach().clone()  # a CUDA graph owns its output

    return Stepper(step=step, watch=run.observer, device=run.device, stepped=run.reporter.stepped)


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


def _measurement(run: _Run, step_seconds: StepSeconds, tokens_per_second: float, setup_seconds: float) -> Measurement:
    assert run.job is not None
    on_gpu = run.device.type == "cuda"
    free, total = torch.cuda.mem_get_info(run.device) if on_gpu else (0, 0)
    telemetry = _telemetry(run)
    return Measurement(
        tokens_per_second=tokens_per_second,
        unit=run.job.unit,
        step_seconds=step_seconds,
        compile=run.observer.compile_cost(),
        setup_seconds=setup_seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(run.device) if on_gpu else _peak_resident_bytes(),
        reserved_memory_bytes=torch.cuda.max_memory_reserved(run.device) if on_gpu else None,
        device_memory_bytes=total - free if on_gpu else None,
        degraded=_degradations(run, telemetry),
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


def _profiled_kernels(stepper: Stepper) -> tuple[str, ...]:
    """The attention kernels of one more step, outside the window: profiling slows a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if stepper.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        with torch.profiler.profile(activities=activities) as profile:
            stepper.step()
            stepper.synchronise()
    except RuntimeError as error:  # the measurement is made; what a profiler adds to a step must not undo it
        log.warning("the profiled step failed, so no attention kernels are known: %s", error)
        return ()
    kernels = sdpa_kernels([event.name for event in profile.events() or []])
    log.info("attention kernels: %s", ", ".join(kernels) or "none fused")
    return kernels


def _telemetry(run: _Run) -> Telemetry:
    seen = run.observer.telemetry(run.setup)
    return seen.model_copy(
        update={
            "mask": run.job.mask if run.job else None,
            "recompiles_in_window": run.recompiles_in_window,
            "sdpa_kernels": run.kernels,
            "environment": environment(run.device, run.request.workload),
        }
    )


@contextmanager
def _recorded_warnings(run: _Run) -> Iterator[None]:
    """Keep the texts of warnings: torch says only there why an attention kernel cannot run."""
    show = warnings.showwarning

    def keep(message: Warning | str, *rest: object, **named: object) -> None:
        run.warnings.append(str(message))
        show(message, *rest, **named)  # type: ignore[arg-type]

    warnings.showwarning = keep
    try:
        yield
    finally:
        warnings.showwarning = show


def _with_reasons(failure: Failure, texts: list[str]) -> Failure:
    reasons = [
        text.split("(Triggered")[0].strip() for text in texts if "not used because" in text or "requires" in text
    ]
    if failure.kind is not FailureKind.BACKEND_UNSUPPORTED or not reasons:
        return failure
    return failure.model_copy(update={"message": f"{failure.message} ({'; '.join(dict.fromkeys(reasons))})"})
