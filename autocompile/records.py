"""What was observed: one record per slice, its measurement or failure with the telemetry beside it, and the verdict."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, field_validator

from autocompile.knob_table import KNOBS, KnobValue
from autocompile.spec import Facts, Fidelity, Role
from autocompile.values import Value


class State(StrEnum):
    """Optuna's trial states. A failure of the config is PRUNED; FAIL is a failure of the machine."""

    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAIL = "FAIL"


class Stage(StrEnum):
    PREFLIGHT = "preflight"
    BUILD = "build"
    APPLY = "apply"
    COMPILE = "compile"
    WARMUP = "warmup"
    MEASURE = "measure"
    CHECK = "check"


class FailureKind(StrEnum):
    OOM = "oom"
    HOST_OOM = "host_oom"
    RECOMPILE_STORM = "recompile_storm"
    GRAPH_BREAK = "graph_break"
    BACKEND_UNSUPPORTED = "backend_unsupported"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    NUMERICS_MISMATCH = "numerics_mismatch"
    HANG = "hang"
    GPU_FAULT = "gpu_fault"
    WORKLOAD_ERROR = "workload_error"
    INFRASTRUCTURE = "infrastructure"
    UNKNOWN = "unknown"

    @property
    def blames_machine(self) -> bool:
        """The same config deserves a second try in a new process."""
        return self in (FailureKind.GPU_FAULT, FailureKind.INFRASTRUCTURE)


class Failure(Value):
    """Why there is no measurement, in one line a user can act on. ``where`` is file:line of the user's code."""

    kind: FailureKind
    stage: Stage
    message: str
    subkind: str | None = None
    where: str | None = None


Seconds: TypeAlias = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class StepSeconds(Value):
    """Seconds of one optimizer step: the median of ``n`` cycles and the ends of its 95 % interval."""

    median: Seconds = Field(gt=0)
    low: Seconds
    high: Seconds
    n: int


class Compile(Value):
    """``seconds`` compiling took in this slice; ``cold_seconds`` what it takes from an empty cache."""

    seconds: Seconds
    cold_seconds: Seconds
    cache: Literal["none", "cold", "partly", "warm"]


Degradation: TypeAlias = Literal[
    "partial_eager", "cudagraph_skipped", "graph_breaks", "throttled", "disturbed", "tight_memory"
]


class GpuState(Value):
    """What NVML said of the GPU during the window. ``limits`` are the reasons for which its clock was held down.

    Names of the reasons are NVML's, lower case: ``sw_power_cap`` is the normal state of large batches.
    """

    sm_clock_mhz: int
    power_watts: float
    temperature_celsius: int
    limits: tuple[str, ...] = ()


class Measurement(Value):
    """One measured slice. ``tokens_per_second`` counts ``unit`` per second of steady training, compile excluded.

    ``mfu`` is ``model_flops_per_second`` (of the model's own arithmetic, recomputation not counted) as a share of what
    a matrix product reaches on this device, see Facts. ``data_wait_seconds`` a cycle is the device's wait for batches.
    """

    tokens_per_second: float = Field(gt=0, le=1e15)
    step_seconds: StepSeconds
    compile: Compile
    unit: Literal["tokens", "samples"] = "tokens"
    setup_seconds: float | None = None
    peak_memory_bytes: int | None = None  # of the rank that needs most
    peak_memory_bytes_by_rank: tuple[int, ...] = ()  # where there are several
    reserved_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    losses: tuple[float, ...] = ()
    model_flops_per_second: float | None = None
    mfu: float | None = None
    data_wait_seconds: float | None = None
    eval_seconds: float | None = None  # of one evaluation step, which is no part of a training step
    gpu: GpuState | None = None
    degraded: tuple[Degradation, ...] = ()


class Region(Value):
    """What became of one group of equal modules: its graphs, how often it was called, hashes of its output code."""

    name: str
    modules: int
    graphs: int
    calls: int | None = None
    code_hashes: tuple[str, ...] = ()


class GraphBreak(Value):
    where: str
    reason: str


class Recompile(Value):
    where: str
    guard: str


class EagerFrame(Value):
    """A frame that was to be compiled and runs eager; over its recompile limit, as far as no graph of it fits."""

    where: str
    reason: str


class CudagraphSkip(Value):
    reason: str


class Deviation(Value):
    """Relative L2 error of one quantity against fp32 eager, eager's own in the study's precision, and the limit."""

    quantity: str  # loss, gradients (all of them together), or the name of a parameter
    error: float | None  # null: not a number, or a gradient that is not there
    eager_error: float
    limit: float

    @property
    def is_beyond(self) -> bool:
        return self.error is None or self.error > self.limit


class Numerics(Value):
    """How far the config's loss and gradients lie from an fp32 eager reference; ``worst`` is nearest to its limit.

    ``checked`` is false where there was nothing to compare with or no limit that could tell; ``note`` says why, or
    what the comparison left out, such as dropout.
    """

    checked: bool
    steps: int = 0
    note: str | None = None
    seconds: float | None = None  # that the comparison took
    worst: tuple[Deviation, ...] = ()  # loss, gradients, and the parameter that comes nearest to its limit


class Telemetry(Value):
    """What the compiler and the kernels really did; beside a measurement and a failure alike."""

    compile_applied: Literal["all", "some", "none"] | None = None
    sdpa_applied: Literal["region", "process", "no"] | None = None
    checkpointing: Literal["inside", "outside", "no"] | None = None  # of the compiled region
    mask: Literal["none", "ones", "padding", "packed"] | None = None
    regions: tuple[Region, ...] = ()
    graphs: int | None = None
    bucket_graphs: int | None = None  # the pieces, where DDP cut graphs at the borders of its buckets
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    recompiles_in_window: int | None = None
    eager_frames: tuple[EagerFrame, ...] = ()
    cudagraph_skips: tuple[CudagraphSkip, ...] = ()
    sdpa_kernels: tuple[str, ...] = ()
    numerics: Numerics | None = None  # null where this slice did not compare
    environment: dict[str, str] = {}


class Measured(Value):
    """The document of a slice that was measured."""

    type: Literal["measurement"] = "measurement"
    measurement: Measurement
    telemetry: Telemetry = Telemetry()


class Failed(Value):
    """The document of a slice that was not."""

    type: Literal["failure"] = "failure"
    failure: Failure
    telemetry: Telemetry = Telemetry()


Outcome: TypeAlias = Measured | Failed
Answer: TypeAlias = Annotated[Measured | Failed | Facts, Field(discriminator="type")]
ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


class Progress(Value):
    """``progress.json``, rewritten by the slice at every change of stage and at least once a second."""

    stage: Stage
    step: int
    reserved_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    time: float


class Stopped(Value):
    """A slice that was ended before it had an outcome of its own, and the bound in seconds that ended it."""

    reason: Literal["budget", "interrupted", "lost"]
    bound: float | None = None


class TrialRecord(Value):
    """One slice of a study. ``value`` is steady tokens per second at full depth; ``seconds`` what the slice took."""

    number: int
    role: Role
    state: State
    config: dict[str, KnobValue]
    fidelity: Fidelity = Fidelity()
    stopped: Stopped | None = None
    value: float | None = None
    value_source: Literal["measured", "predicted"] | None = None
    outcome: Annotated[Measured | Failed, Field(discriminator="type")] | None = None
    seconds: float | None = None

    @field_validator("config")
    @classmethod
    def _complete(cls, config: dict[str, KnobValue]) -> dict[str, KnobValue]:
        """The record may be older than a knob, which was at its default then."""
        return {**config, **{name: knob.default for name, knob in KNOBS.items() if name not in config}}

    @property
    def measurement(self) -> Measurement | None:
        return self.outcome.measurement if isinstance(self.outcome, Measured) else None

    @property
    def failure(self) -> Failure | None:
        return self.outcome.failure if isinstance(self.outcome, Failed) else None


class Derived(Value):
    """A config that needed no slice, and why."""

    config: dict[str, KnobValue]
    source: Literal["copied", "predicted", "skipped"]
    same_as: int | None = None
    reason: str


class Result(StrEnum):
    """Of compile against eager."""

    WIN = "win"
    TIE = "tie"
    LOSS = "loss"
    NONE = "none"


class PlannedRun(Value):
    """The quickest config for a run of ``amount`` tokens (or samples), compile included, beside the best eager one."""

    steps: int  # of the chosen config
    amount: int
    config: dict[str, KnobValue]
    seconds: float
    eager_seconds: float | None


class Verdict(Value):
    """What the study says. Ratios are of the objective, above 1 is faster; null where they were not measured.

    ``speedup`` is over eager with the winner's other knobs, ``speedup_vs_best_eager`` (and its interval) over the
    best config with scope none. In a tie or loss ``config`` is the best eager one, while the ratios are those of
    the best compiled one. ``rounds`` is how many paired confirmations the interval stands on,
    ``unmeasured`` what usually wins, or the winner's batch without compile, that neither time nor trials were left for;
    ``speedup_over_against`` compares ``config`` with what the user runs today.
    """

    result: Result
    confirmed: bool
    config: dict[str, KnobValue] | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_vs_best_eager: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    speedup_vs_plain_compile: float | None = None
    speedup_over_against: float | None = None
    break_even_steps: int | None = None
    confirmed_by: tuple[int, ...] = ()
    rounds: int = 0
    by_length: tuple[PlannedRun, ...] = ()
    unmeasured: tuple[dict[str, KnobValue], ...] = ()
