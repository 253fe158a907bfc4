"""What NVML says of the GPU around a window: how fast it ran, what held it down, who else used it.

NVML asks the driver, so sampling never waits for the work that is measured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from types import TracebackType
from typing import Any

import pynvml

from autocompile.records import Degradation, GpuState

PERIOD_SECONDS = 0.5  # a sample keeps the host busy for 1.4 ms

# NVML's nvmlClocksEventReason bits. Not that of an idle GPU: it holds nothing down, and is set around every window.
REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
SLOWDOWNS = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})

log = logging.getLogger("autocompile.slice")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The GPU at one moment; ``reasons`` are NVML's bits."""

    sm_clock_mhz: int
    power_watts: float
    temperature_celsius: int
    reasons: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """How much of the SM one process used up to this time, by NVML's clock."""

    pid: int
    time_stamp: int
    sm_percent: int


def summary(samples: Sequence[Sample]) -> GpuState | None:
    if not samples:
        return None
    return GpuState(
        sm_clock_mhz=round(median(sample.sm_clock_mhz for sample in samples)),
        power_watts=round(fmean(sample.power_watts for sample in samples), 1),
        temperature_celsius=max(sample.temperature_celsius for sample in samples),
        limits=tuple(name for bit, name in REASONS.items() if any(sample.reasons & bit for sample in samples)),
    )


def flags(state: GpuState | None, users: Collection[int]) -> tuple[Degradation, ...]:
    """Why a window is not to be trusted. A power cap is the normal state of large batches, and no reason.

    ``users`` are the processes that used the SM: in a container their ids are the host's, so none is known to be this
    one. A single one is; two are one too many.
    """
    found: list[Degradation] = []
    if state is not None and SLOWDOWNS & set(state.limits):
        found.append("throttled")
    if len(users) > 1:
        found.append("disturbed")
    return tuple(found)


def users_since(samples: Iterable[ProcessUse], time_stamp: int) -> set[int]:
    """Processes that used the SM after this time; NVML mixes in stale entries and ones of more than 100 percent."""
    return {sample.pid for sample in samples if sample.time_stamp > time_stamp and 0 < sample.sm_percent <= 100}


@dataclass(frozen=True)
class Nvml:
    """One GPU, as NVML knows it."""

    handle: Any

    def sample(self) -> Sample:
        return Sample(
            sm_clock_mhz=pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM),
            power_watts=pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3,
            temperature_celsius=pynvml.nvmlDeviceGetTemperature(self.handle, pynvml.NVML_TEMPERATURE_GPU),
            reasons=pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle),
        )

    def processes(self, time_stamp: int) -> list[ProcessUse]:
        """Since this time, by NVML's clock; none where it cannot tell, as on a GPU that is split into MIG slices."""
        try:
            found = pynvml.nvmlDeviceGetProcessUtilization(self.handle, time_stamp)
        except pynvml.NVMLError:  # also raised where there are none
            return []
        return [ProcessUse(pid=one.pid, time_stamp=one.timeStamp, sm_percent=one.smUtil) for one in found]


def opened(uuid: str) -> Nvml | None:
    """The GPU that torch knows by this UUID; None, and a line in the log, where NVML is missing or refuses."""
    try:
        pynvml.nvmlInit()  # and no shutdown: others in this process use it too, and it goes with the process
        nvml = Nvml(_handle(uuid.removeprefix("GPU-").removeprefix("MIG-")))
        nvml.sample()
    except pynvml.NVMLError as error:
        log.warning("NVML: %s; clocks, power and temperature stay unknown", error)
        return None
    return nvml


def _handle(bare_uuid: str) -> Any:
    """torch leaves out what tells a GPU from a MIG slice. A slice has no clock of its own, its GPU's stands for it."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare_uuid}")
    except pynvml.NVMLError_NotFound:
        slice_handle = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare_uuid}")
        return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice_handle)


class GpuWatch:
    """Samples a GPU from where it is entered to where it is left, in a thread; without NVML it sees nothing."""

    def __init__(self, nvml: Nvml | None) -> None:
        self._nvml = nvml
        self._samples: list[Sample] = []
        self._users: set[int] = set()
        self._began = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_sampling, daemon=True)

    def __enter__(self) -> GpuWatch:
        if self._nvml is not None:
            self._began = max((process.time_stamp for process in self._nvml.processes(0)), default=0)
            self._take()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._take()

    @property
    def state(self) -> GpuState | None:
        return summary(self._samples) if self._nvml is not None else None

    @property
    def flags(self) -> tuple[Degradation, ...]:
        return flags(self.state, self._users)

    def _keep_sampling(self) -> None:
        while not self._stopped.wait(PERIOD_SECONDS):
            self._take()

    def _take(self) -> None:
        if self._nvml is None:
            return
        try:
            self._samples.append(self._nvml.sample())
        except pynvml.NVMLError as error:
            log.warning("NVML: %s; clocks, power and temperature stay unknown", error)
            self._nvml = None
            return
        self._users |= users_since(self._nvml.processes(self._began), self._began)
