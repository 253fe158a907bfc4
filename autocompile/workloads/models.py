"""Models of the catalogue, the Hub or a directory, built on the device, with random or real weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from autocompile.catalogue import catalogue, source_of
from autocompile.errors import UserError
from autocompile.knobs.setup import NotApplicable, has_windows
from autocompile.spec import Method, Task, WorkloadSpec
from autocompile.workloads.batches import count_packed, cycled, rows_of, with_document_mask
from autocompile.workloads.job import Context, Job, WorkloadError
from autocompile.workloads.methods import adapted, quantisation, quantised_construction
from autocompile.workloads.precision import base_dtype, compute_dtype, resolved_precision
from autocompile.workloads.tasks import TASKS, image_size, task_of
from autocompile.workloads.training import count_tokens

LORA_FROM_PARAMETERS = 1_000_000_000


_POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl")  # these count from pad + 1


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model at full depth, as far as it is known without its weights. ``model`` lies on the meta device."""

    model: nn.Module
    model_type: str
    task: Task
    layers: int
    parameters: int


def describe(workload: WorkloadSpec) -> Description:
    """Resolve the model. Raises WorkloadError for one that is unknown, not made for its task, or too short."""
    config = _config(workload)
    task = _task(config, workload)
    _check_size(config, workload, task)
    model = _on_meta(config, workload, task)
    return Description(
        model=model,
        model_type=config.model_type,
        task=task,
        layers=_layers(config),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def resolved_method(workload: WorkloadSpec, parameters: int, task: Task) -> Method:
    """The method asked for; else adapters for a language model so large that few machines hold a full fine-tune."""
    large = task is Task.CAUSAL_LM and parameters >= LORA_FROM_PARAMETERS
    return workload.method or (Method.LORA if large else Method.FULL)


def build(ctx: Context, workload: WorkloadSpec) -> Job:
    """A job on the model, with random batches. Equal seeds give equal weights and equal batches."""
    config = _config(workload)
    task = _task(config, workload)
    _check_size(config, workload, task)
    method = workload.method or resolved_method(workload, describe(workload).parameters, task)
    workload = workload.model_copy(update={"method": method, "task": task})
    _cut(config, ctx.depth)
    torch.manual_seed(ctx.seed)
    model, training = _weighted(config, ctx, workload), TASKS[task]
    if method is not Method.FULL:
        model = adapted(model, workload.lora, training.adapters)
    rows = rows_of(ctx, ctx.lengths.once if ctx.lengths and training.reads_tokens else None)
    dtype = base_dtype(resolved_precision(workload, ctx.device.type), method)
    is_packed = rows[0].documents is not None
    if is_packed and has_windows(model):
        raise NotApplicable("padding packed: some layers of this model see only what is near, which no mask of it says")
    mask = partial(with_document_mask, causal=task is Task.CAUSAL_LM)
    return Job(
        model=model.train(),
        loss=training.loss,
        epoch=len(rows),
        tokens=count_packed if is_packed else count_tokens,
        batches=cycled(
            ctx,
            rows,
            lambda each, generator: training.batch(config, workload, each, generator),
            dtype,
            *([mask] if is_packed else []),
        ),
    )


def _task(config: PreTrainedConfig, workload: WorkloadSpec) -> Task:
    entry = catalogue().get(workload.model or "")
    return workload.task or (Task(entry.task) if entry else task_of(config))


def _config(workload: WorkloadSpec) -> PreTrainedConfig:
    assert workload.model is not None
    try:
        source = source_of(workload.model)
    except UserError as error:
        raise WorkloadError(str(error)) from error
    if source == "catalogue":
        entry = catalogue()[workload.model]
        labels = {} if entry.labels is None else {"num_labels": entry.labels}
        config = AutoConfig.for_model(entry.model_type, **entry.config, **labels)
    else:
        try:
            # Always given: left out, transformers asks on the terminal whether to run remote code.
            config = AutoConfig.from_pretrained(workload.model, trust_remote_code=workload.trust_remote_code)
        except (OSError, ValueError) as error:
            raise WorkloadError(f"{workload.model}: {_why_unreadable(error)}") from error
    config.use_cache = False
    if workload.image_size is not None and hasattr(config, "image_size"):
        config.image_size = workload.image_size
    return config


def _why_unreadable(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "this model runs code of its own, which needs --trust-remote-code"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _on_meta(config: PreTrainedConfig, workload: WorkloadSpec, task: Task) -> nn.Module:
    with torch.device("meta"):
        return _new(config, workload, task)


def _new(config: PreTrainedConfig, workload: WorkloadSpec, task: Task, dtype: torch.dtype | None = None) -> nn.Module:
    """A model with random weights, on the device whose context this is called in."""
    training = TASKS[task]
    if task is Task.CLASSIFICATION and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # such a head looks for the last token that is none
    try:  # its attention is scaled_dot_product_attention wherever transformers has that for the model
        model: nn.Module = training.auto.from_config(config, dtype=dtype, trust_remote_code=workload.trust_remote_code)
    except ValueError as error:
        raise WorkloadError(f"{workload.model}: not {training.what}: {_first_line(error)}") from error
    return model


def _check_size(config: PreTrainedConfig, workload: WorkloadSpec, task: Task) -> None:
    """Learned positions end; rotary ones go on, if not well. Images come in whole patches."""
    if TASKS[task].reads_tokens and workload.image_size is not None:
        raise WorkloadError(f"{workload.model}: image size {workload.image_size} means nothing to {TASKS[task].what}")
    if not TASKS[task].reads_tokens:
        if workload.lengths is not None:
            raise WorkloadError(f"{workload.model}: lengths {workload.lengths} mean nothing to {TASKS[task].what}")
        side, patch = image_size(config, workload.image_size), getattr(config, "patch_size", None)
        if isinstance(patch, int) and side % patch:
            raise WorkloadError(
                f"{workload.model}: image size {side} is no multiple of the model's {patch} pixels a patch"
            )
        return
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not limit or getattr(text, "rope_parameters", None) is not None:
        return
    if config.model_type in _POSITIONS_AFTER_PADDING:
        limit -= (config.pad_token_id or 0) + 1
    if workload.sequence_length > limit:
        raise WorkloadError(
            f"{workload.model}: sequence length {workload.sequence_length} is above the model's {limit} positions"
        )


def _layers(config: PreTrainedConfig) -> int:
    """Repeated blocks; a convolutional network has some in each of its stages."""
    text = config.get_text_config()
    return int(getattr(text, "num_hidden_layers", 0) or sum(getattr(text, "depths", ())))


def _cut(config: PreTrainedConfig, depth: int | None) -> None:
    """Models that count their blocks otherwise stay whole."""
    text = config.get_text_config()
    if depth is None or depth >= getattr(text, "num_hidden_layers", 0):
        return
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = text.layer_types[:depth]
    text.num_hidden_layers = depth


def _weighted(config: PreTrainedConfig, ctx: Context, workload: WorkloadSpec) -> nn.Module:
    """The model on the device, in the dtype that its method and precision want; quantised where the method says so."""
    assert workload.method is not None and workload.task is not None
    precision = resolved_precision(workload, ctx.device.type)
    dtype, arithmetic = base_dtype(precision, workload.method), compute_dtype(precision)
    if workload.weights:
        return _pretrained(config, ctx, workload, dtype=dtype)
    if workload.method is not Method.QLORA:
        with ctx.device:
            return _new(config, workload, workload.task, dtype)
    with quantised_construction(_on_meta(config, workload, workload.task), arithmetic, std=_std(config)), ctx.device:
        model = _new(config, workload, workload.task, dtype)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # by which peft knows that its 4-bit adapters fit
    return model


def _std(config: PreTrainedConfig) -> float:
    return float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)


def _pretrained(config: PreTrainedConfig, ctx: Context, workload: WorkloadSpec, *, dtype: torch.dtype) -> nn.Module:
    """Real weights, from the place that the model's name stands for."""
    assert workload.model is not None and workload.task is not None
    entry = catalogue().get(workload.model)
    name = entry.hub if entry else workload.model
    if name is None:
        raise WorkloadError(f"{workload.model}: there are no weights of this model to load")
    arithmetic = compute_dtype(resolved_precision(workload, ctx.device.type))
    try:
        model: nn.Module = TASKS[workload.task].auto.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            trust_remote_code=workload.trust_remote_code,
            device_map={"": ctx.device},
            quantization_config=quantisation(arithmetic) if workload.method is Method.QLORA else None,
        )
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{name}: {_first_line(error)}") from error
    return model
