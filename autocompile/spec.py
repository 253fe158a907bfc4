"""What is asked: the study's spec, the request to a slice, and the facts of a machine."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from autocompile.knob_table import KnobValue
from autocompile.space import Config, SearchSpace, Traits
from autocompile.values import Value, digest


class Method(StrEnum):
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Precision(StrEnum):
    """``bf16`` is weights, activations and gradients in bf16; the mixed ones are fp32 weights under autocast."""

    BF16 = "bf16"
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "fp16-mixed"
    FP32 = "fp32"


class Task(StrEnum):
    """What a model's head is for."""

    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    CLASSIFICATION = "classification"
    IMAGE_CLASSIFICATION = "image-classification"


class Parallel(StrEnum):
    """How one trial trains on several GPUs of one host; ``fsdp`` is FSDP2, ``zero`` DeepSpeed's. With ``auto`` each
    trial's config says it."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO0 = "zero0"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    AUTO = "auto"

    @property
    def zero_stage(self) -> int | None:
        """Of DeepSpeed's ZeRO, where this is one."""
        return int(self[-1]) if self.startswith("zero") else None


class Role(StrEnum):
    BASELINE = "baseline"
    PROBE = "probe"
    SEARCH = "search"
    CONFIRM = "confirm"


class LoraSpec(Value):
    """peft's LoraConfig as far as it changes speed: rank, scale and dropout, on all linear layers of the blocks."""

    r: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class WorkloadSpec(Value):
    """What is trained. Either ``model`` (catalogue name, Hub id or directory) or ``script`` (FILE.py:FUNCTION)."""

    model: str | None = None
    script: str | None = None
    trainer: Literal["hf"] | None = None  # what a script's function returns instead of a Job
    task: Task | None = None  # of a model; None: the preflight reads it off the model's config
    method: Method | None = None  # None: the slice's preflight decides by size, see Facts
    precision: Precision | None = None  # None: bf16 on GPUs, fp32 on CPUs
    sequence_length: int = Field(default=1024, ge=2)
    lengths: str | None = None  # of the sequences, see autocompile.lengths; None: all have the sequence length
    tokenizer: str | None = None  # that tells the lengths of texts, a Hub id or directory; None: the model's own
    image_size: int | None = Field(default=None, ge=1)  # pixels on a side; None: as the model was made for
    global_batch: int | None = Field(default=None, ge=1)
    eval_every: int | None = Field(default=None, ge=1)  # optimizer steps between evaluation steps; None: there are none
    lora: LoraSpec = LoraSpec()
    mask: Literal["none", "ones", "padding"] = "none"
    weights: bool = False
    trust_remote_code: bool = False
    parallel: Parallel = Parallel.NONE
    gpus_per_trial: int = Field(default=1, ge=1)  # processes of one trial, also on a CPU
    device: Literal["cuda", "cpu"] | None = None  # None: the GPU if there is one
    deepspeed_config: dict[str, Any] | None = None  # the user's own, as it is in their file
    options: dict[str, KnobValue] = {}  # of a user's script, from --set workload.KEY=VALUE

    @model_validator(mode="before")
    @classmethod
    def _without_what_became_a_knob(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if name != "optimizer"} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSpec:
        if (self.model is None) == (self.script is None):
            raise ValueError("give exactly one of a model and a workload script")
        if self.script is not None and (self.task is not None or self.image_size is not None):
            raise ValueError("task and image_size are a model's; a workload script decides both itself")
        if self.tokenizer is not None and not (self.lengths or "").endswith(".jsonl"):
            raise ValueError("a tokenizer tells the lengths of texts; give --lengths a .jsonl file")
        if self.trainer is not None and self.script is None:
            raise ValueError("a trainer is what a workload script's function returns; give --workload")
        return self

    @field_validator("parallel", mode="before")
    @classmethod
    def _one_host(cls, value: Any) -> Any:
        if value not in list(Parallel):
            ways = ", ".join(Parallel)
            raise ValueError(f"expected {ways}; more hosts, tensor, pipeline and context parallelism are not covered")
        return value

    @model_validator(mode="after")
    def _one_way_to_train_on_several(self) -> WorkloadSpec:
        if self.parallel is Parallel.NONE and self.gpus_per_trial > 1:
            ways = ", ".join(way for way in Parallel if way is not Parallel.NONE)
            raise ValueError(f"gpus_per_trial {self.gpus_per_trial} needs a way to use them: give --parallel {ways}")
        if self.parallel is not Parallel.NONE and self.gpus_per_trial < 2:
            raise ValueError(f"parallel {self.parallel} trains on several GPUs: give --gpus-per-trial 2 or more")
        if self.parallel is Parallel.AUTO and self.global_batch is None:
            raise ValueError("parallel auto compares ways to train at one global batch: give --global-batch")
        if reason := _why_not_parallel(self, self.parallel):
            raise ValueError(f"parallel {self.parallel}: {reason}")
        return self

    def legal_ways(self) -> tuple[Parallel, ...]:
        """The ways to train this workload on several GPUs, those that keep most of it whole first, and on one."""
        ways = Parallel.DDP, Parallel.ZERO2, Parallel.FSDP, Parallel.ZERO3, Parallel.NONE
        return tuple(way for way in ways if _why_not_parallel(self, way) is None)

    def of_config(self, config: Config) -> WorkloadSpec:
        """As a trial of this config trains it."""
        if self.parallel is not Parallel.AUTO:
            return self
        way = Parallel(str(config["parallel"]))
        return self.model_copy(update={"parallel": way, "gpus_per_trial": self.n_ranks(config)})

    def n_ranks(self, config: Config) -> int:
        """The processes that train a config together."""
        alone = self.parallel is Parallel.AUTO and config["parallel"] == Parallel.NONE
        return 1 if alone else self.gpus_per_trial


def _why_not_parallel(workload: WorkloadSpec, parallel: Parallel) -> str | None:
    """What of this workload its way to train on several GPUs cannot do."""
    stage = parallel.zero_stage
    if parallel is Parallel.NONE:
        return None
    if workload.trainer is not None:
        return "a Trainer sets up its own; so far it is measured on one GPU"
    if workload.method is Method.QLORA and (parallel is Parallel.FSDP or stage == 3):
        return "bitsandbytes' 4-bit weights cannot be sharded; ddp, zero1 and zero2 keep them whole"
    if workload.precision is Precision.FP16_MIXED and parallel not in (Parallel.DDP, Parallel.AUTO):
        return "its gradients are scaled by a scaler of its own, which fp16-mixed here is not; bf16 needs none"
    return None


class Fidelity(Value):
    """How deep the measured model is; None is its full depth."""

    layers: int | None = None


FULL_DEPTH = Fidelity()


class Budget(Value):
    """How long a study may take: wall-clock seconds over all its runs, and measured trials; None is no limit."""

    seconds: float | None = None
    trials: int | None = None


class Search(Value):
    """The plan of `tune`: baselines, known-good configs, then a sampler, then confirmations."""

    type: Literal["search"] = "search"
    sampler: Literal["auto", "tpe", "random", "grid"] = "auto"


class Grid(Value):
    """Measure every config of the space once, in order."""

    type: Literal["grid"] = "grid"


class Paired(Value):
    """Only confirm: these configs in turns, in fresh processes."""

    type: Literal["paired"] = "paired"
    configs: tuple[dict[str, KnobValue], ...]

    @property
    def reference(self) -> dict[str, KnobValue] | None:
        """The first, with which the others are compared; None where compiled configs are compared with eager ones."""
        compared = {config["scope"] == "none" for config in self.configs}
        return None if compared == {True, False} else self.configs[0]


Plan: TypeAlias = Annotated[Search | Grid | Paired, Field(discriminator="type")]


class StudySpec(Value):
    """One study. ``budget``, the planned run (in tokens or in steps) and its caches are no part of its identity."""

    workload: WorkloadSpec
    space: SearchSpace
    pinned: dict[str, KnobValue] = {}
    against: dict[str, KnobValue] | None = None  # what the user trains with today, whatever the space holds
    plan: Plan = Search()
    memory_headroom: float = Field(default=0.08, ge=0, lt=1)  # share of the device's memory that stays free
    seed: int = 0
    budget: Budget = Budget()
    planned_tokens: int | None = Field(default=None, ge=1)
    planned_steps: int | None = Field(default=None, ge=1)  # of one global batch each
    cache_root: str | None = None
    cache_bytes: int = Field(default=10 * 1024**3, ge=0)  # compile caches of configs that cannot win are evicted above

    @model_validator(mode="after")
    def _one_length(self) -> StudySpec:
        if self.planned_tokens is not None and self.planned_steps is not None:
            raise ValueError("give at most one of planned_tokens and planned_steps")
        if self.planned_steps is not None and self.workload.global_batch is None:
            raise ValueError("planned_steps needs workload.global_batch, since a step is one global batch")
        return self

    def tokens_of_run(self, tokens_per_step: float) -> int | None:
        """Length of the planned run, given what one of its steps holds; None where no run is planned."""
        if self.planned_steps is None:
            return self.planned_tokens
        return max(1, round(self.planned_steps * tokens_per_step))

    def identity(self) -> dict[str, Any]:
        """What makes this study another than one of the same name, as plain JSON."""
        elsewhere = {"budget", "planned_tokens", "planned_steps", "cache_root", "cache_bytes"}
        found = self.model_dump(mode="json", exclude=elsewhere)
        for part, name in ((found, "against"), (found["workload"], "deepspeed_config")):
            if part[name] is None:  # as before there was such a field
                del part[name]
        return found

    def hash(self) -> str:
        return digest(self.identity())


class PreflightRequest(Value):
    """Ask a child what this machine and this workload are. ``devices`` are GPU indices; empty is a CPU or any GPU."""

    type: Literal["preflight"] = "preflight"
    workload: WorkloadSpec
    seed: int
    devices: tuple[int, ...]
    deadline_seconds: float
    cache_folder: str


class MeasureRequest(Value):
    """Ask a child to measure one config. ``deadline_seconds`` is for the whole slice, from its start.

    ``numerics`` asks for the comparison with an fp32 reference; ``compile_threads`` None leaves inductor its own;
    ``cpus`` are those that the slice's processes may run on, empty is all.
    """

    type: Literal["measure"] = "measure"
    workload: WorkloadSpec
    config: dict[str, KnobValue]
    role: Role
    fidelity: Fidelity
    seed: int
    devices: tuple[int, ...]
    deadline_seconds: float
    cache_folder: str
    numerics: bool = True
    compile_threads: int | None = None
    cpus: tuple[int, ...] = ()


SliceRequest: TypeAlias = PreflightRequest | MeasureRequest


class Device(Value):
    """``memory_bytes`` is the device's total memory; ``type`` is cuda or cpu (then uuid is ``cpu``)."""

    type: Literal["cuda", "cpu"] = "cuda"
    uuid: str
    name: str
    memory_bytes: int
    capability: str | None = None  # compute capability, as "9.0"


class Facts(Value):
    """What the preflight child found out; the study's first ones are kept and are what decisions see.

    ``matmul_flops_per_second`` is what a large matrix product reaches on the device in the workload's precision.
    """

    type: Literal["facts"] = "facts"
    devices: tuple[Device, ...] = Field(min_length=1)
    layers: int
    parameters: int
    environment: dict[str, str]  # gpu, torch, triton, driver, key libraries, hash of the workload file
    model_type: str | None = None
    task: Task | None = None  # of a model that is no user's script
    method: Method = Method.FULL
    precision: Precision = Precision.FP32
    regions: dict[str, str] | None = None  # scope name -> fnmatch pattern on module names; None: nobody looked
    frozen_knobs: dict[str, str] = {}  # knob -> why this workload does not let it vary
    free_memory_bytes: int | None = None
    matmul_flops_per_second: float | None = None


def resolved(workload: WorkloadSpec, facts: Facts) -> WorkloadSpec:
    """The workload with the task, method, precision and device that the preflight settled where none was asked for."""
    device = facts.devices[0].type
    found = {"method": facts.method, "precision": facts.precision, "device": device, "task": facts.task}
    return workload.model_copy(update=found)


def traits(spec: StudySpec, facts: Facts) -> Traits:
    """The facts that conditions of a search space may name."""
    device = facts.devices[0]
    return {
        "device": device.type,
        "method": str(facts.method),
        "precision": str(facts.precision),
        "world_size": spec.workload.gpus_per_trial,
        "shapes": "fixed" if spec.workload.lengths is None else "varying",
        **({"task": str(facts.task)} if facts.task else {}),
        **({"gpu_capability": device.capability} if device.capability else {}),
    }


def gradient_accumulation(workload: WorkloadSpec, config: Config) -> int:
    """Micro-batches per optimizer step, one rank; 1 where no global batch is given."""
    if workload.global_batch is None:
        return 1
    return workload.global_batch // (int(config["micro_batch"]) * workload.n_ranks(config))
