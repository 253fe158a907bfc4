"""Which attention kernels a step runs, as torch's profiler sees them."""

from __future__ import annotations

import logging

import torch

from autocompile.slice.measure import Stepper
from autocompile.slice.telemetry import sdpa_kernels

log = logging.getLogger("autocompile.slice")


def profiled_kernels(stepper: Stepper) -> tuple[str, ...]:
    """The attention kernels of one more step, outside the window: profiling slows a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if stepper.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        with torch.profiler.profile(activities=activities) as profile:
            stepper.step()
            stepper.synchronise()
    except RuntimeError as error:  # the measurement is made; what a profiler adds to a step must not undo it
        if stepper.group.world_size > 1:  # the others may be waiting inside this step
            raise
        log.warning("the profiled step failed, so no attention kernels are known: %s", error)
        return ()
    # Not `profile.events()`: torch would first build a Python object for each event, 5 s for a step of a 7B model.
    assert profile.profiler is not None
    kernels = sdpa_kernels([event.name() for event in profile.profiler.kineto_results.events()])
    log.info("attention kernels: %s", ", ".join(kernels) or "none fused")
    return kernels
