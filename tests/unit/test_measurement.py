"""When a window may begin and when it counts: decisions of a slice's measurement, with steps that need no model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pynvml
import pytest
import torch

from autocompile.records import GpuState
from autocompile.slice.clocks import reconciled
from autocompile.slice.cycles import steps_of_an_epoch, steps_to_all_shapes
from autocompile.slice.gpu_state import REASONS, SLOWDOWNS, ProcessUse, Sample, flags, summary, users_since
from autocompile.slice.measure import (
    MOST_COMPILING_STEPS,
    RecompileStorm,
    Stepper,
    is_narrow,
    is_warm,
    steady_window,
    warm_up,
)
from autocompile.slice_plan import SlicePlan, slice_plan
from autocompile.spec import Role
from autocompile.workloads.job import Job

PLAN = SlicePlan(interval=0.02, window_seconds=0.0, repeats=False)  # ends with its fifth cycle, however disturbed


@dataclass
class Script:
    """Steps of which some compile, and one hits a recompile limit; counted from 1."""

    compiling: Sequence[int] = ()
    limit_hit: int | None = None
    losses: list[int] = field(default_factory=list)

    def n_compiles(self) -> int:
        return sum(1 for step in self.compiling if step <= len(self.losses))

    def limit_hits(self) -> list[str]:
        return ["forward model.py:3"] if self.limit_hit and self.limit_hit <= len(self.losses) else []

    def step(self) -> torch.Tensor:
        time.sleep(0.002)  # a hiccup of the machine must not look like a disturbed window
        self.losses.append(1 + len(self.losses))
        return torch.tensor(float(self.losses[-1]))

    def stepper(self) -> Stepper:
        return Stepper(
            step=self.step,
            watch=self,
            device=torch.device("cpu"),
            stepped=lambda: None,
            waited_seconds=lambda: 0.25 * len(self.losses),
            nvml=None,
        )


@pytest.mark.parametrize(
    ("steps", "shape_steps", "quiet_steps", "quiet_seconds", "warm"),
    [
        pytest.param(2, 1, 2, 9.0, False, id="fewer than three steps"),
        pytest.param(9, 1, 1, 9.0, False, id="something compiled in the step before last"),
        pytest.param(9, 1, 9, 1.9, False, id="not long enough at work to be hot"),
        pytest.param(9, 10, 9, 9.0, False, id="a shape has not come yet"),
        pytest.param(3, 3, 2, 2.0, True, id="quiet and hot"),
    ],
)
def test_a_window_may_begin(steps: int, shape_steps: int, quiet_steps: int, quiet_seconds: float, warm: bool) -> None:
    quiet = {"quiet_steps": quiet_steps, "quiet_seconds": quiet_seconds}
    assert is_warm(steps=steps, shape_steps=shape_steps, **quiet, preheat_seconds=2.0) is warm


@pytest.mark.parametrize(
    ("epoch", "n_micro_batches", "steps"),
    [(None, 2, 1), (6, 1, 6), (6, 2, 3), (5, 2, 5), (6, 4, 3)],
)
def test_steps_of_an_epoch(epoch: int | None, n_micro_batches: int, steps: int) -> None:
    job = Job(
        model=torch.nn.Linear(1, 1), loss=lambda model, batch: model(batch), batches=lambda: iter(()), epoch=epoch
    )
    assert steps_of_an_epoch(job, n_micro_batches) == steps


@pytest.mark.parametrize(
    ("widths", "n_micro_batches", "steps"),
    [
        pytest.param([8, 8, 8, 8], 1, 1, id="one shape"),
        pytest.param([8, 4, 8, 2, 8, 4], 1, 4, id="the last new one comes fourth"),
        pytest.param([8, 4, 8, 2, 8, 4], 2, 2, id="or in the second step of two micro-batches"),
    ],
)
def test_all_shapes_of_a_stream(widths: list[int], n_micro_batches: int, steps: int) -> None:
    batches = [(torch.zeros(2, width), torch.zeros(2)) for width in widths]
    job = Job(model=torch.nn.Linear(1, 1), loss=lambda model, batch: model(batch), batches=lambda: iter(batches))
    assert steps_to_all_shapes(job, n_micro_batches) == steps


@pytest.mark.parametrize(
    ("compiling", "n_steps"),
    [
        pytest.param((), 3, id="never less than three steps"),
        pytest.param((1,), 3, id="the first step compiles"),
        pytest.param((1, 2, 4, 5), 7, id="until two in a row did not"),
        pytest.param((1, 4), 3, id="what compiles later is the window's to find"),
    ],
)
def test_warm_up_lasts_until_it_is_quiet(compiling: Sequence[int], n_steps: int) -> None:
    assert warm_up(Script(compiling).stepper(), PLAN) == list(range(1, n_steps + 1))


@pytest.mark.parametrize(
    ("script", "n_steps", "message"),
    [
        pytest.param(
            Script(range(1, 500)), MOST_COMPILING_STEPS, "still compiling after 60 steps", id="compiles for ever"
        ),
        pytest.param(
            Script(range(1, 500, 2)), 2 * MOST_COMPILING_STEPS - 1, "still compiling after 119", id="every other step"
        ),
        pytest.param(
            Script((1, 2, 3), limit_hit=3), 3, "limit hit: forward model.py:3 runs eager", id="silently eager"
        ),
    ],
)
def test_a_storm_in_warm_up(script: Script, n_steps: int, message: str) -> None:
    with pytest.raises(RecompileStorm, match=message):
        warm_up(script.stepper(), PLAN)
    assert len(script.losses) == n_steps


def test_a_window_of_a_cpu() -> None:
    window = steady_window(Script().stepper(), PLAN)
    assert (window.step_seconds.n, window.data_wait_seconds) == (5, 0.25)
    assert (window.losses, window.flags, window.gpu) == ((1, 2, 3, 4, 5), (), None)


def test_evaluation_steps_are_timed_apart() -> None:
    script, calls = Script(), []

    def evaluate() -> None:
        time.sleep(0.05)
        calls.append(len(script.losses))

    stepper = replace(script.stepper(), evaluate=evaluate, eval_every=2)
    window = steady_window(stepper, PLAN)
    assert calls == [2, 4]
    assert (window.step_seconds.n, len(window.losses)) == (5, 5)
    assert window.eval_seconds is not None and window.eval_seconds > 0.04
    assert window.step_seconds.high < 0.04


def test_a_window_over_batches_that_differ_holds_whole_epochs() -> None:
    window = steady_window(replace(Script().stepper(), epoch_steps=4), PLAN.model_copy(update={"window_seconds": 0.1}))
    assert window.step_seconds.n % 4 == 0


def test_a_compile_inside_voids_the_window_once() -> None:
    script = Script(compiling=[3])
    window = steady_window(script.stepper(), PLAN)
    assert window.step_seconds.n == 5
    assert window.losses == tuple(range(1, 5 + 3 + 5 + 1))  # the void window, warm-up again, and the one that counts


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(Script(compiling=(3, 10)), "inside two windows in a row", id="a second compile inside"),
        pytest.param(Script(limit_hit=4), "limit hit", id="a limit hit inside"),
    ],
)
def test_a_storm_in_the_window(script: Script, message: str) -> None:
    with pytest.raises(RecompileStorm, match=message):
        steady_window(script.stepper(), PLAN)


def test_a_probe_is_a_whole_minute_however_equal_its_cycles_are() -> None:
    plan = slice_plan(Role.PROBE)
    assert plan.window_seconds == 60
    assert not is_narrow([0.001] * 100_000, plan.interval)


@pytest.mark.parametrize(
    ("seconds", "interval", "narrow"),
    [
        pytest.param([1.0] * 7, 0.02, False, id="too few to say"),
        pytest.param([1.0] * 8, 0.02, True, id="eight equal ones"),
        pytest.param([1.0, 1.1] * 8, 0.02, False, id="ten percent apart"),
        pytest.param([1.0, 1.1] * 8, 0.06, True, id="within what is asked for"),
    ],
)
def test_the_median_is_known_well_enough(seconds: list[float], interval: float, narrow: bool) -> None:
    assert is_narrow(seconds, interval) is narrow


@pytest.mark.parametrize(
    ("seconds", "wall", "expected", "agree"),
    [
        pytest.param([0.01] * 1000, 10.19, [0.01] * 1000, True, id="within two percent"),
        pytest.param([1.0] * 5, 5.9, [1.0] * 5, True, id="within one cycle"),
        pytest.param([0.5] * 4, 4.0, [1.0] * 4, False, id="the wall clock's is larger and counts"),
        pytest.param([1.0] * 4, 2.0, [1.0] * 4, False, id="the events' is larger and counts"),
    ],
)
def test_events_against_the_wall_clock(seconds: list[float], wall: float, expected: list[float], agree: bool) -> None:
    found, agreed = reconciled(seconds, wall)
    assert (found, agreed) == (pytest.approx(expected), agree)


def sample(clock: int = 1980, power: float = 600.0, temperature: int = 60, reasons: int = 0) -> Sample:
    return Sample(sm_clock_mhz=clock, power_watts=power, temperature_celsius=temperature, reasons=reasons)


def state(*limits: str) -> GpuState:
    return GpuState(sm_clock_mhz=1980, power_watts=600.0, temperature_celsius=60, limits=limits)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param([], None, id="nothing seen"),
        pytest.param([sample()], state(), id="one sample"),
        pytest.param(
            [sample(345, 500.0, 50), sample(1980, 700.0, 70), sample(1980, 600.0, 60)],
            GpuState(sm_clock_mhz=1980, power_watts=600.0, temperature_celsius=70),
            id="median clock, mean power, highest temperature",
        ),
        pytest.param([sample(reasons=1)], state(), id="idleness holds nothing down"),
        pytest.param(
            [sample(reasons=0x4), sample(), sample(reasons=0x60)],
            state("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown"),
            id="each reason seen at any time",
        ),
    ],
)
def test_summary(samples: list[Sample], expected: GpuState | None) -> None:
    assert summary(samples) == expected


@pytest.mark.parametrize(
    ("found", "users", "expected"),
    [
        pytest.param(None, set(), (), id="nothing is known"),
        pytest.param(state("sw_power_cap", "applications_clocks_setting"), {1}, (), id="the normal state"),
        *(pytest.param(state(name), {1}, ("throttled",), id=name) for name in sorted(SLOWDOWNS)),
        pytest.param(state(), {1, 2}, ("disturbed",), id="two processes"),
        pytest.param(None, {1, 2}, ("disturbed",), id="two processes on a GPU that says nothing else"),
        pytest.param(state("hw_slowdown"), {1, 2}, ("throttled", "disturbed"), id="both"),
    ],
)
def test_flags(found: GpuState | None, users: set[int], expected: tuple[str, ...]) -> None:
    assert flags(found, users) == expected


@pytest.mark.parametrize(
    ("time_stamp", "percent", "counts"),
    [
        pytest.param(101, 1, True, id="used the SM a little"),
        pytest.param(101, 0, False, id="holds memory only"),
        pytest.param(100, 50, False, id="before the window"),
        pytest.param(101, 4_000_000, False, id="no percentage"),
    ],
)
def test_users_since(time_stamp: int, percent: int, counts: bool) -> None:
    process = ProcessUse(pid=7, time_stamp=time_stamp, sm_percent=percent)
    assert users_since([process], 100) == ({7} if counts else set())


def test_reasons_are_named_as_nvml_names_them() -> None:
    prefix = "nvmlClocksEventReason"
    named = {name.removeprefix(prefix): getattr(pynvml, name) for name in dir(pynvml) if name.startswith(prefix)}
    words = {"".join(word.capitalize() for word in name.split("_")): bit for bit, name in REASONS.items()}
    for left_out in ("None", "All", "GpuIdle", "UserDefinedClocks"):  # the last is an old name of another
        del named[left_out]
    assert words == named
