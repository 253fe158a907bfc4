"""The YAML of Axolotl (`axolotl train`)."""

from __future__ import annotations

from typing import Any

from autocompile.best_file import BestConfig
from autocompile.export.fields import Export, fields
from autocompile.export.hf_trainer import arguments, of_trainer
from autocompile.knob_table import KnobValue

_ATTENTION = {"eager": "eager", "flex": "flex_attention"}
_PADDINGS = ("longest", "fixed", "packed")
_CARRIED = ("sequence_length", "method", "precision", "lora.r", "lora.alpha", "lora.dropout")
_RENAMED = {"per_device_train_batch_size": "micro_batch_size", "optim": "optimizer"}
_ITS_OWN = ("bf16", "fp16", "use_cpu", "fsdp")


def axolotl(best: BestConfig) -> Export:
    """Its ``torch_compile`` keys would compile the whole model with errors suppressed; its own launcher is
    Accelerate's, which overwrites the environment, hence python or torchrun."""
    asked = fields(best)
    carried = [*_CARRIED]
    if asked["padding"] in _PADDINGS:
        carried.append("padding")
    if asked["sdpa"] in _ATTENTION:
        carried.append("sdpa")
    theirs = {_RENAMED.get(name, name): value for name, value in arguments(best).items() if name not in _ITS_OWN}
    return of_trainer(best, {**theirs, **_own(asked)}, *carried, start="-m axolotl.cli.train FILE")


def _own(asked: dict[str, KnobValue]) -> dict[str, Any]:
    precision = asked["precision"]
    found = {
        "bf16": precision == "bf16-mixed",
        "fp16": precision == "fp16-mixed",
        "bfloat16": precision == "bf16",
        "float32": precision == "fp32",
        "sequence_len": asked["sequence_length"],
        "sample_packing": asked["padding"] == "packed",
        "pad_to_sequence_len": asked["padding"] == "fixed",
        "attn_implementation": _ATTENTION.get(str(asked["sdpa"]), "sdpa"),
    }
    if asked["method"] == "full":
        return found
    adapters = {
        "adapter": asked["method"],
        "lora_r": asked["lora.r"],
        "lora_alpha": asked["lora.alpha"],
        "lora_dropout": asked["lora.dropout"],
        "lora_target_linear": True,
    }
    return {**found, **adapters, **({"load_in_4bit": True} if asked["method"] == "qlora" else {})}
