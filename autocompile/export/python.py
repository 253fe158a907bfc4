"""A short piece of Python that configures a model without this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autocompile.best_file import BestConfig
from autocompile.export.fields import Export, fields
from autocompile.knob_table import KNOBS, KnobValue

_MODULES = {
    "model": "[model]",
    "layer": "layers(model)",
    "attention": "[layer.get_submodule(name) for layer in layers(model) for name in ATTENTION if hasattr(layer, name)]",
    "mlp": "[layer.get_submodule(name) for layer in layers(model) for name in MLP if hasattr(layer, name)]",
}
_NAMES = {
    "attention": 'ATTENTION = "self_attn", "attn", "attention", "self_attention"',
    "mlp": 'MLP = "mlp", "ffn", "feed_forward"',
}
_NEAREST = {"nested": "model"}  # of scopes that take more than a short piece of code; of all others the layers are
_LAYERS = '''def layers(model):
    """The repeated blocks: the list of modules that holds the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters())))
'''
_KERNELS = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}
_ATTENTION = {"eager": "eager", "flex": "flex_attention"}
_OPTIMIZERS = {
    "adamw_torch_fused": "torch.optim.AdamW(parameters, lr=lr, fused=True)",
    "adamw_torch": "torch.optim.AdamW(parameters, lr=lr, foreach=True)",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit(parameters, lr=lr)",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit(parameters, lr=lr)",
}
_OPTIONS = tuple(name for name, knob in KNOBS.items() if knob.inductor and name != "mode")
_LOST = ("implicit_causal_mask", "compiled_loss", "deepspeed.compile", "deepspeed.deepcompile")
_CONSTANTS = ("micro_batch", "gradient_accumulation", "precision", "sequence_length", "padding", "method", "parallel")


def python(best: BestConfig) -> Export:
    """What takes a patch of transformers is lost; ranks and padding are named for the script to do."""
    asked = fields(best)
    runs = {**asked, **{name: KNOBS[name].default for name in _LOST if name in asked}}
    why = {}
    if asked["scope"] not in ("none", *_MODULES):
        runs["scope"] = _NEAREST.get(str(asked["scope"]), "layer")
        why["scope"] = "other modules take frames of their own, which autocompile.apply makes"
    if asked["dynamic"] == "marked":
        runs["dynamic"] = "auto"
        why["dynamic"] = "call torch._dynamo.mark_dynamic(tensor, dimension) on what a compiled module is called with"
    return Export(text="\n".join(_lines(runs)), runs=runs, suffix=".py", why=why, about=_ABOUT)


def _lines(runs: Mapping[str, KnobValue]) -> Iterator[str]:
    """A module with constants, ``configure(model)`` and ``optimizer(parameters, lr)``."""
    bits = "import bitsandbytes\n" if "8bit" in str(runs["optimizer"]) else ""
    yield f"import torch\n{bits}"
    names = [name for name in runs if name in _CONSTANTS or name == "world_size" or name.split(".")[0] in _FAMILIES]
    yield from (f"{name.upper().replace('.', '_')} = {runs[name]!r}" for name in names)
    scope = str(runs["scope"])
    if scope in _NAMES:
        yield _NAMES[scope]
    yield f"\n\n{_LAYERS}" if scope in ("layer", *_NAMES) else ""
    yield "\ndef configure(model):"
    yield '    """Before DDP, FSDP or DeepSpeed wrap the model, and before its first call."""'
    yield from (f"    {line}" for line in [*_settings(runs), *_compile(runs)] or ["pass"])
    yield "\n\ndef optimizer(parameters, lr):"
    yield f"    return {_OPTIMIZERS[str(runs['optimizer'])]}"
    yield ""


_ABOUT = "from it import configure and optimizer; the constants are for your script"
_FAMILIES = ("lora", "ddp", "fsdp", "deepspeed")


def _settings(runs: Mapping[str, KnobValue]) -> Iterator[str]:
    yield f'torch.set_float32_matmul_precision("{runs["float32_matmul_precision"]}")'
    if (sdpa := str(runs["sdpa"])) in _KERNELS:
        for name, kernel in _KERNELS.items():
            yield f"torch.backends.cuda.enable_{kernel}_sdp({name == sdpa})"
    if sdpa in _ATTENTION:
        yield f'model.set_attn_implementation("{_ATTENTION[sdpa]}")'
    if runs["channels_last"]:
        yield "model.to(memory_format=torch.channels_last)"
    if runs["gradient_checkpointing"]:
        yield 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
    if runs["input_gradients"]:
        yield "model.enable_input_require_grads()"


def _compile(runs: Mapping[str, KnobValue]) -> Iterator[str]:
    scope = str(runs["scope"])
    if scope == "none":
        return
    yield 'if hasattr(model, "config"):\n        model.config.use_cache = False'
    yield f"torch._dynamo.config.recompile_limit = {runs['cache_size_limit']}"
    if runs["parallel"] == "ddp":
        yield f"torch._dynamo.config.optimize_ddp = {runs['ddp.optimize_ddp']}"
    if runs["activation_memory_budget"] != KNOBS["activation_memory_budget"].default:
        yield f"torch._functorch.config.activation_memory_budget = {runs['activation_memory_budget']}"
    yield f"for module in {_MODULES[scope]}:"
    yield f"    module.compile({', '.join(_arguments(runs))})"


def _arguments(runs: Mapping[str, KnobValue]) -> Iterator[str]:
    yield f'backend="{runs["backend"]}"'
    options = {name: runs[name] for name in _OPTIONS if runs[name] != KNOBS[name].default}
    if options:  # which exclude a mode, that is nothing but options
        yield f'options={{**torch._inductor.list_mode_options("{runs["mode"]}"), **{options!r}}}'
    elif runs["mode"] != "default":
        yield f'mode="{runs["mode"]}"'
    yield f"fullgraph={runs['fullgraph']}"
    yield f"dynamic={ {'auto': None, 'true': True, 'false': False}[str(runs['dynamic'])] }"
