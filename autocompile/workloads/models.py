"""Causal language models of the catalogue, the Hub or a directory, built on the device, with random or real weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from autocompile.catalogue import catalogue, source_of
from autocompile.errors import UserError
from autocompile.spec import Method, WorkloadSpec
from autocompile.workloads.batches import token_batches
from autocompile.workloads.job import Context, Job, WorkloadError
from autocompile.workloads.methods import adapted, quantisation, quantised_construction
from autocompile.workloads.precision import base_dtype, compute_dtype, resolved_precision

LORA_FROM_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model at full depth, as far as it is known without its weights. ``model`` lies on the meta device."""

    model: nn.Module
    model_type: str
    layers: int
    parameters: int


def describe(workload: WorkloadSpec) -> Description:
    """Resolve the model. Raises WorkloadError for one that is unknown, no causal language model, or too short."""
    config = _config(workload)
    _check_length(config, workload)
    model = _on_meta(config, workload)
    return Description(
        model=model,
        model_type=config.model_type,
        layers=config.get_text_config().num_hidden_layers,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def resolved_method(workload: WorkloadSpec, parameters: int) -> Method:
    """The method asked for; else adapters from a size at which few machines hold a full fine-tune."""
    return workload.method or (Method.LORA if parameters >= LORA_FROM_PARAMETERS else Method.FULL)


def build(ctx: Context, workload: WorkloadSpec) -> Job:
    """A job on the model, with random token batches. Equal seeds give equal weights and equal batches."""
    config = _config(workload)
    _check_length(config, workload)
    method = workload.method or resolved_method(workload, describe(workload).parameters)
    _cut(config, ctx.depth)
    torch.manual_seed(ctx.seed)
    model = _weighted(config, ctx, workload.model_copy(update={"method": method}))
    if method is not Method.FULL:
        model = adapted(model, workload.lora)
    return Job(
        model=model.train(),
        loss=causal_lm_loss,
        batches=token_batches(ctx, config.get_text_config().vocab_size, workload.mask),
    )


def causal_lm_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # The config's default would build a cache whose state guards recompile each layer until the limit.
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def _config(workload: WorkloadSpec) -> PreTrainedConfig:
    assert workload.model is not None
    try:
        source = source_of(workload.model)
    except UserError as error:
        raise WorkloadError(str(error)) from error
    if source == "catalogue":
        entry = catalogue()[workload.model]
        config = AutoConfig.for_model(entry.model_type, **entry.config)
    else:
        try:
            # Always given: left out, transformers asks on the terminal whether to run remote code.
            config = AutoConfig.from_pretrained(workload.model, trust_remote_code=workload.trust_remote_code)
        except (OSError, ValueError) as error:
            raise WorkloadError(f"{workload.model}: {_why_unreadable(error)}") from error
    config.use_cache = False
    return config


def _why_unreadable(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "this model runs code of its own, which needs --trust-remote-code"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _on_meta(config: PreTrainedConfig, workload: WorkloadSpec) -> nn.Module:
    with torch.device("meta"):
        return _new(config, workload)


def _new(config: PreTrainedConfig, workload: WorkloadSpec, dtype: torch.dtype | None = None) -> nn.Module:
    """A model with random weights, on the device whose context this is called in."""
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=workload.trust_remote_code
        )
    except ValueError as error:
        raise WorkloadError(f"{workload.model}: not a causal language model: {_first_line(error)}") from error
    return model


def _check_length(config: PreTrainedConfig, workload: WorkloadSpec) -> None:
    """Learned positions end; rotary ones go on, if not well."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit and workload.sequence_length > limit and getattr(text, "rope_parameters", None) is None:
        raise WorkloadError(
            f"{workload.model}: sequence length {workload.sequence_length} is above the model's {limit} positions"
        )


def _cut(config: PreTrainedConfig, depth: int | None) -> None:
    text = config.get_text_config()
    if depth is None or depth >= text.num_hidden_layers:
        return
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = text.layer_types[:depth]
    text.num_hidden_layers = depth


def _weighted(config: PreTrainedConfig, ctx: Context, workload: WorkloadSpec) -> nn.Module:
    """The model on the device, in the dtype that its method and precision want; quantised where the method says so."""
    assert workload.method is not None
    precision = resolved_precision(workload, ctx.device.type)
    dtype, arithmetic = base_dtype(precision, workload.method), compute_dtype(precision)
    if workload.weights:
        return _pretrained(config, ctx, workload, dtype=dtype)
    if workload.method is not Method.QLORA:
        with ctx.device:
            return _new(config, workload, dtype)
    with quantised_construction(_on_meta(config, workload), arithmetic, std=_std(config)), ctx.device:
        model = _new(config, workload, dtype)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # by which peft knows that its 4-bit adapters fit
    return model


def _std(config: PreTrainedConfig) -> float:
    return float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)


def _pretrained(config: PreTrainedConfig, ctx: Context, workload: WorkloadSpec, *, dtype: torch.dtype) -> nn.Module:
    """Real weights, from the place that the model's name stands for."""
    assert workload.model is not None
    entry = catalogue().get(workload.model)
    name = entry.hub if entry else workload.model
    if name is None:
        raise WorkloadError(f"{workload.model}: there are no weights of this model to load")
    arithmetic = compute_dtype(resolved_precision(workload, ctx.device.type))
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=workload.trust_remote_code,
            device_map={"": ctx.device},
            quantization_config=quantisation(arithmetic) if workload.method is Method.QLORA else None,
        )
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{name}: {_first_line(error)}") from error
    return model
