"""One rank of a slice: build, apply knobs, compile, warm up, measure, check."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch._dynamo

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
from autocompile.slice.cycles import Cycle, Waited, cycles, steps_of_an_epoch, steps_to_all_shapes, tokens_of_cycles
from autocompile.slice.environment import environment
from autocompile.slice.gpu_state import opened
from autocompile.slice.locking import gpu_lock
from autocompile.slice.measure import RecompileStorm, Stepper, Window, steady_window, warm_up
from autocompile.slice.numerics import check, require_close
from autocompile.slice.parity import Reference, compare, dropout_off, eager_reference, require_finite
from autocompile.slice.progress import Reporter
from autocompile.slice.telemetry import CompileObserver, sdpa_kernels
from autocompile.slice.warned import recorded_warnings, with_reasons
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
    telemetry: Telemetry | None = None  # as it was when the measurement was made
    warnings: list[str] = field(default_factory=list)


def run_rank(request: MeasureRequest, reporter: Reporter) -> Outcome:
    """Measure one config; every exception becomes a `Failed` with the telemetry gathered until then."""
    device = torch.device("cuda", 0) if _on_gpu(request) else torch.device("cpu")
    with CompileObserver() as observer, ExitStack() as stack:
        run = _Run(request=request, reporter=reporter, observer=observer, device=device)
        stack.enter_context(recorded_warnings(run.warnings))
        try:
            if device.type == "cuda":
                stack.enter_context(gpu_lock(str(torch.cuda.get_device_properties(device).uuid)))
            measurement = _measured(run)
            _check_numerics(run)
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
    eager = eager_reference(job, first, request.seed)
    _forget_peaks(run.device)
    reporter.enter(Stage.APPLY)
    run.setup = apply_config(Setup(model=job.model, regions=job.regions), request.config)
    run.observer.groups = run.setup.groups
    stepper = _stepper(run, itertools.chain([first], batches), job.optimizer(trainable(job.model)))
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
    run.kernels = _profiled_kernels(stepper)
    return measurement.model_copy(update={"losses": tuple(losses[:_LOSSES_KEPT])})


def _check_numerics(run: _Run) -> None:
    """The timed model goes first, so that there is room for copies of it; they compile too, which is not telemetry."""
    assert run.job is not None
    run.telemetry = _telemetry(run)
    parameters = sum(parameter.numel() for parameter in run.job.model.parameters())
    run.job = run.setup = None
    numerics = check(
        run.request, device=run.device, parameters=parameters, observer=run.observer, reporter=run.reporter
    )
    run.telemetry = run.telemetry.model_copy(update={"numerics": numerics})
    if numerics is not None:
        require_close(numerics)


def _context(run: _Run) -> Context:
    request = run.request
    return Context.of(
        request.workload, request.config, device=run.device, seed=request.seed, depth=request.fidelity.layers
    )


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


def _stepper(run: _Run, batches: Iterator[Cycle], optimizer: torch.optim.Optimizer) -> Stepper:
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
        evaluate=_evaluation(job, device) if run.request.workload.eval_every else None,
        eval_every=run.request.workload.eval_every or 1,
        watch=run.observer,
        device=device,
        stepped=run.reporter.stepped,
        waited_seconds=fed.seconds,
        shape_steps=shape_steps,
        epoch_steps=steps_of_an_epoch(job, n_micro_batches) if unequal else 1,
        nvml=opened(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None,
    )


def _evaluation(job: Job, device: torch.device) -> Callable[[], None]:
    """One step of it: the loss of a batch of a stream of its own, in eval mode and without gradients."""
    batches = cycles(job, 1)

    def evaluate() -> None:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        modes = [(module, module.training) for module in job.model.modules()]  # a script may keep parts in eval mode
        job.model.eval()
        try:
            with torch.no_grad():
                job.loss(job.model, next(batches)[0])
        finally:
            for module, training in modes:
                module.training = training

    return evaluate


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
    # Not `profile.events()`: torch would first build a Python object for each event, 5 s for a step of a 7B model.
    assert profile.profiler is not None
    kernels = sdpa_kernels([event.name() for event in profile.profiler.kineto_results.events()])
    log.info("attention kernels: %s", ", ".join(kernels) or "none fused")
    return kernels


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
