"""One row per knob: which values it takes, what it is when nobody sets it, and what it touches. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from autocompile.values import shown

KnobValue: TypeAlias = bool | int | float | str

SCOPES = ("none", "model", "nested", "layer", "attention", "qkv", "mlp", "lora")
WHOLE_MODEL_SCOPES = ("model", "nested")
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
WAYS_TO_TRAIN = ("none", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")  # on how many GPUs of one host, and how
AUTOTUNE_MODES = ("max-autotune-no-cudagraphs", "max-autotune")


@dataclass(frozen=True, kw_only=True)
class Knob:
    """``values`` are all that exist, or None where any whole number from 1 up is legal.

    ``compiles``: means something only where something is compiled. ``inductor``: only where inductor compiles.
    ``memory``: changes how much memory a training step takes, so that an out-of-memory verdict carries over to configs
    equal in these knobs. ``parallel``: only of trials that train in this family of ways on several GPUs, see `family`.
    """

    default: KnobValue
    values: tuple[KnobValue, ...] | None = None
    pattern: bool = False
    compiles: bool = False
    inductor: bool = False
    memory: bool = False
    parallel: str | None = None


KNOBS: dict[str, Knob] = {
    "scope": Knob(default="none", values=SCOPES, pattern=True, memory=True),
    "backend": Knob(default="inductor", values=("inductor", "aot_eager", "cudagraphs"), compiles=True, memory=True),
    "mode": Knob(default="default", values=MODES, compiles=True, inductor=True, memory=True),
    "fullgraph": Knob(default=False, values=(False, True), compiles=True),
    "dynamic": Knob(default="auto", values=("auto", "marked", "true", "false"), compiles=True),
    "cache_size_limit": Knob(default=8, compiles=True),
    "sdpa": Knob(default="auto", values=("auto", "flash", "efficient", "cudnn", "math", "eager", "flex"), memory=True),
    "implicit_causal_mask": Knob(default=False, values=(False, True), memory=True),
    "compiled_loss": Knob(default=False, values=(False, True), compiles=True, memory=True),
    "optimizer": Knob(
        default="adamw_torch_fused",
        values=("adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit"),
        memory=True,
    ),
    "micro_batch": Knob(default=4, memory=True),
    "padding": Knob(default="longest", values=("fixed", "longest", "bucket:64", "bucket:128", "packed"), memory=True),
    "gradient_checkpointing": Knob(default=False, values=(False, True), memory=True),
    "activation_memory_budget": Knob(default=1.0, values=(1.0, 0.75, 0.5, 0.25, 0.0), compiles=True, memory=True),
    "input_gradients": Knob(default=False, values=(False, True), compiles=True, memory=True),
    "channels_last": Knob(default=False, values=(False, True), memory=True),
    "float32_matmul_precision": Knob(default="highest", values=("highest", "high")),
    "coordinate_descent_tuning": Knob(default=False, values=(False, True), compiles=True, inductor=True),
    "epilogue_fusion": Knob(default=True, values=(True, False), compiles=True, inductor=True),
    "shape_padding": Knob(default=True, values=(True, False), compiles=True, inductor=True, memory=True),
    "combo_kernels": Knob(default=False, values=(False, True), compiles=True, inductor=True),
    "max_autotune_gemm_backends": Knob(
        default="ATEN,TRITON,CPP", values=("ATEN,TRITON,CPP", "ATEN", "TRITON"), compiles=True, inductor=True
    ),
    "fallback_random": Knob(default=False, values=(False, True), compiles=True, inductor=True),
    "parallel": Knob(default="none", values=WAYS_TO_TRAIN, memory=True),
    "ddp.bucket_cap_mb": Knob(default=25, memory=True, parallel="ddp"),
    "ddp.gradient_as_bucket_view": Knob(default=False, values=(False, True), memory=True, parallel="ddp"),
    "ddp.optimize_ddp": Knob(default=True, values=(True, False), compiles=True, parallel="ddp"),
    "fsdp.reshard_after_forward": Knob(default=True, values=(True, False), memory=True, parallel="fsdp"),
    "fsdp.param_dtype": Knob(default="as_is", values=("as_is", "bf16"), memory=True, parallel="fsdp"),
    "fsdp.reduce_dtype": Knob(default="as_is", values=("as_is", "fp32", "bf16"), memory=True, parallel="fsdp"),
    # auto is DeepSpeed's own default: on with stage 3, off with the others
    "deepspeed.overlap_comm": Knob(default="auto", values=("auto", True, False), memory=True, parallel="deepspeed"),
    "deepspeed.reduce_bucket_size": Knob(default=500_000_000, memory=True, parallel="deepspeed"),
    "deepspeed.allgather_bucket_size": Knob(default=500_000_000, memory=True, parallel="deepspeed"),
    "deepspeed.compile": Knob(default=False, values=(False, True), compiles=True, memory=True, parallel="deepspeed"),
    "deepspeed.deepcompile": Knob(
        default=False, values=(False, True), compiles=True, memory=True, parallel="deepspeed"
    ),
}


def family(parallel: str) -> str:
    """Whose way to train on several GPUs this is: DeepSpeed's stages share their knobs."""
    return "deepspeed" if parallel.startswith("zero") else parallel


def idle(config: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """The knobs that mean nothing beside the others' values, and may as well be at their defaults."""
    others = _OF_OTHER_WAYS[str(config.get("parallel", "none"))]
    if config.get("scope", "none") == "none":
        return (*_OF_COMPILE, *others)
    of_loss = ("compiled_loss",) if config["scope"] in WHOLE_MODEL_SCOPES else ()
    return (*_of_compiler(config), *of_loss, *_of_the_engine(config), *others)


def _of_the_engine(config: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """DeepSpeed's engine compiles the whole model or nothing."""
    if config["scope"] != "model":
        return _ENGINE_COMPILES
    return _ENGINE_COMPILES[1:] if config.get("deepspeed.compile") is False else ()


def _of_compiler(config: Mapping[str, KnobValue]) -> tuple[str, ...]:
    backend = config.get("backend", "inductor")
    if backend != "inductor":
        return (*_OF_INDUCTOR, *_OF_THE_PARTITIONER) if backend == "cudagraphs" else _OF_INDUCTOR
    if config.get("mode", "default") in AUTOTUNE_MODES:
        return _ON_WITH_AUTOTUNING
    return _OF_AUTOTUNING


_OF_COMPILE = tuple(name for name, knob in KNOBS.items() if knob.compiles)
_OF_OTHER_WAYS = {
    way: tuple(name for name, knob in KNOBS.items() if knob.parallel not in (None, family(way)))
    for way in WAYS_TO_TRAIN
}
_OF_INDUCTOR = tuple(name for name, knob in KNOBS.items() if knob.inductor)
_OF_THE_PARTITIONER = ("activation_memory_budget",)
_OF_AUTOTUNING = ("max_autotune_gemm_backends",)
_ENGINE_COMPILES = ("deepspeed.compile", "deepspeed.deepcompile")
_ON_WITH_AUTOTUNING = ("coordinate_descent_tuning",)


def records_cuda_graphs(config: Mapping[str, KnobValue]) -> bool:
    """Whether what is compiled is replayed as CUDA graphs, on a GPU."""
    if config.get("scope", "none") == "none":
        return False
    backend = config.get("backend", "inductor")
    return backend == "cudagraphs" or (backend == "inductor" and config.get("mode") in CUDA_GRAPH_MODES)


def materialises_mask(config: Mapping[str, KnobValue]) -> bool:
    """A trace of the whole model makes a causal mask that attention would not need, and flash does not take."""
    return config.get("scope") in WHOLE_MODEL_SCOPES and not config.get("implicit_causal_mask")


def is_pattern(scope: KnobValue) -> bool:
    """A scope that holds a dot or a star is an fnmatch pattern on dotted module names."""
    return isinstance(scope, str) and ("." in scope or "*" in scope)


def problem(name: str, value: object) -> str | None:
    """What is wrong with this value for this knob, as the end of a sentence; None if it is legal."""
    knob = KNOBS[name]
    if knob.values is None:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if whole else f"expected a whole number from 1, found {shown(value)}"
    if knob.pattern and isinstance(value, str) and is_pattern(value):
        return None
    if any(value == known and type(value) is type(known) for known in knob.values):
        return None
    wanted = ", ".join(str(known).lower() if isinstance(known, bool) else str(known) for known in knob.values)
    return f"expected one of {wanted}{' or a pattern such as *.q_proj' if knob.pattern else ''}, found {shown(value)}"


def coerce(name: str, value: object) -> object:
    """YAML reads true and false as booleans; for `dynamic` they are the strings of these names. 1 may mean 1.0."""
    if name == "dynamic" and isinstance(value, bool):
        return "true" if value else "false"
    if (
        name in KNOBS
        and isinstance(KNOBS[name].default, float)
        and isinstance(value, int)
        and not isinstance(value, bool)
    ):
        return float(value)
    return value
