"""Specs, facts and records for the tests of the search, and a whole study on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autocompile.knob_table import KnobValue
from autocompile.records import (
    Compile,
    Failed,
    Failure,
    FailureKind,
    Measured,
    Measurement,
    Outcome,
    Stage,
    State,
    StepSeconds,
    Stopped,
    Telemetry,
    TrialRecord,
)
from autocompile.search import Ask, Finished, Measure, Wait, admissible, candidates, canonical, next_step
from autocompile.space import Config, parse_space
from autocompile.spec import Budget, Device, Facts, Role, StudySpec, WorkloadSpec

GIB = 1 << 30
SPACE = parse_space(
    """
format: 1
parameters:
  scope: {choices: [none, layer, model, attention], default: none, why: tests}
  mode:
    - {choices: [default], default: default, when: {device: [cpu]}, why: tests}
    - {choices: [default, reduce-overhead, max-autotune], default: default, when: {scope: [layer, model]}, why: tests}
  fullgraph: {choices: [false, true], default: false, when: {scope: [layer, model]}, why: tests}
  sdpa: {choices: [auto, flash], default: auto, why: tests}
  micro_batch: {low: 1, high: 16, scale: log2, default: 4, why: tests}
  gradient_checkpointing: {choices: [false, true], default: false, why: tests}
""",
    source="tests",
)
SMALL_SPACE = parse_space(
    """
format: 1
parameters:
  scope: {choices: [none, layer], default: none, why: tests}
  micro_batch: {low: 2, high: 8, scale: log2, default: 4, why: tests}
""",
    source="tests",
)
CUDA = Device(uuid="GPU-0", name="NVIDIA H200", memory_bytes=140 * GIB, capability="9.0")
CPU = Device(type="cpu", uuid="cpu", name="cpu", memory_bytes=16 * GIB)


def spec(**fields: object) -> StudySpec:
    workload = {"model": "llama2-7b", **fields.pop("workload", {})}  # type: ignore[dict-item]
    budget = Budget(seconds=fields.pop("seconds", None), trials=fields.pop("trials", None))
    return StudySpec(**{"space": SPACE, **fields}, workload=WorkloadSpec(**workload), budget=budget)


def facts(device: Device = CUDA, **fields: object) -> Facts:
    environment = {"gpu": device.name, "torch": "2.13.0+cu130", "triton": "3.7.1"}
    return Facts(**{"layers": 32, "parameters": 7, "environment": environment, **fields}, devices=(device,))


def config(**knobs: KnobValue) -> dict[str, KnobValue]:
    return canonical(knobs)


EAGER = config()
LAYER = config(scope="layer")
GRAPHS = config(scope="layer", mode="reduce-overhead")
MODEL = config(scope="model")


def measured(
    number: int,
    settings: Config,
    speed: float,
    *,
    role: Role = Role.SEARCH,
    seconds: float | None = 30.0,
    cold_seconds: float | None = None,
    reserved_gib: float = 10.0,
    applied: str | None = "all",
    cache: str | None = None,
    **fields: object,
) -> TrialRecord:
    cold = (0.0 if settings["scope"] == "none" else 13.0) if cold_seconds is None else cold_seconds
    step = int(settings["micro_batch"]) * 512 / speed
    return TrialRecord(
        number=number,
        role=role,
        state=State.COMPLETE,
        config=dict(settings),
        value=speed,
        value_source="measured",
        seconds=seconds,
        outcome=Measured(
            measurement=Measurement(
                tokens_per_second=speed,
                step_seconds=StepSeconds(median=step, low=step * 0.99, high=step * 1.01, n=20),
                compile=Compile(seconds=cold, cold_seconds=cold, cache=cache or ("cold" if cold else "none")),
                reserved_memory_bytes=int(reserved_gib * GIB),
                **fields,
            ),
            telemetry=Telemetry(compile_applied=applied, graphs=2),
        ),
    )


def confirmed(
    number: int, settings: Config, speed: float, *, cache: str | None = "warm", **fields: object
) -> TrialRecord:
    return measured(number, settings, speed, role=Role.CONFIRM, cache=cache, **fields)


def confirmations(first: int, *arms: tuple[Config, Sequence[float]], **fields: object) -> list[TrialRecord]:
    """Blocks in which each config runs in the given order, with one of its speeds in each; the last may lack some."""
    blocks = range(max(len(speeds) for _, speeds in arms))
    runs = [(settings, speeds[n]) for n in blocks for settings, speeds in arms if n < len(speeds)]
    return [confirmed(first + n, settings, speed, **fields) for n, (settings, speed) in enumerate(runs)]


def noisy(speed: float, n: int, noise: float) -> list[float]:
    """That much above and below it in turns."""
    return [speed * (1 + noise * (-1) ** k) for k in range(n)]


def failed(
    number: int,
    settings: Config,
    kind: FailureKind,
    *,
    role: Role = Role.SEARCH,
    state: State | None = None,
    seconds: float = 20.0,
) -> TrialRecord:
    return TrialRecord(
        number=number,
        role=role,
        state=state or (State.FAIL if kind.blames_machine else State.PRUNED),
        config=dict(settings),
        seconds=seconds,
        outcome=Failed(failure=Failure(kind=kind, stage=Stage.WARMUP, message=f"{kind} happened")),
    )


def stopped(
    number: int, settings: Config, reason: str, *, role: Role = Role.SEARCH, seconds: float = 20.0
) -> TrialRecord:
    update = {"state": State.FAIL, "stopped": Stopped(reason=reason, bound=seconds), "seconds": seconds}
    return running(number, settings, role=role).model_copy(update=update)


def running(number: int, settings: Config, *, role: Role = Role.SEARCH) -> TrialRecord:
    return TrialRecord(number=number, role=role, state=State.RUNNING, config=dict(settings))


Oracle = Callable[[Config, Role], tuple[Outcome, float]]
ALONE = (Role.CONFIRM, Role.PROBE)  # what is claimed is measured with nothing beside it
MANY_SLICES = 500  # more than any of the simulated studies needs: a planner that never ends is found out


@dataclass(frozen=True)
class Ended:
    """A simulated study: what it said, its records, when it ended and how many slices its budget cut."""

    finished: Finished
    records: tuple[TrialRecord, ...]
    seconds: float
    n_cut: int


def simulate(
    study: StudySpec,
    known: Facts,
    oracle: Oracle,
    *,
    n_slots: int = 1,
    before: Sequence[TrialRecord] = (),
    used: float = 0.0,
    seed: int = 0,
) -> Ended:
    """Run the planner as the coordinator does, each slice taking the seconds that the oracle says."""
    records = {record.number: record for record in before}
    ends: dict[int, tuple[float, TrialRecord]] = {}
    now, n_cut, pick = used, 0, random.Random(seed)
    limit = study.budget.seconds
    while True:
        seen = [records[number] for number in sorted(records)]
        step = next_step(study, known, seen, now) if len(ends) < n_slots else Wait()
        if isinstance(step, Ask):
            may = admissible(study, known, seen, now)
            shuffled = pick.sample(candidates(study, known), k=len(candidates(study, known)))
            step = Measure(next(c for c in shuffled if may(c)), Role.SEARCH, step.fidelity)
        match step:
            case Measure(config=chosen, role=role):
                number = len(records)
                started, beside = running(number, chosen, role=role), [records[other] for other in ends]
                assert not any(disturb(started, other) for other in beside), f"{started} beside {beside}"
                assert number < MANY_SLICES
                outcome, seconds = oracle(chosen, role)
                cut = limit is not None and now + seconds > limit
                n_cut += cut
                end = limit if cut and limit is not None else now + seconds
                records[number] = started
                ends[number] = (end, _told(records[number], None if cut else outcome, seconds=end - now))
            case Finished():
                assert not ends, "finished while a slice runs"
                return Ended(step, tuple(seen), now, n_cut)
            case _:
                assert ends, f"{step} with nothing running"
                number = min(ends, key=lambda n: ends[n][0])
                now, records[number] = ends.pop(number)


def disturb(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether one of the two is measured in quiet only, and the other makes noise."""
    pairs = [(one, other), (other, one)]
    compiling = any(quiet.role is Role.BASELINE and loud.config["scope"] != "none" for quiet, loud in pairs)
    return compiling or bool({one.role, other.role} & set(ALONE))


def _told(record: TrialRecord, outcome: Outcome | None, *, seconds: float) -> TrialRecord:
    record = record.model_copy(update={"seconds": seconds})
    if outcome is None:
        return record.model_copy(update={"state": State.FAIL, "stopped": Stopped(reason="budget", bound=seconds)})
    if isinstance(outcome, Failed):
        state = State.FAIL if outcome.failure.kind.blames_machine else State.PRUNED
        return record.model_copy(update={"state": state, "outcome": outcome})
    value = outcome.measurement.tokens_per_second
    return record.model_copy(update={"state": State.COMPLETE, "outcome": outcome, "value": value})
