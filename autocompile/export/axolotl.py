"""The YAML of Axolotl."""

from __future__ import annotations

from autocompile.best_file import BestConfig
from autocompile.export.adapters import adapters, attention, told
from autocompile.export.fields import Export, fields
from autocompile.export.hf_trainer import arguments, checkpointing, launcher, of_trainer
from autocompile.knob_table import KnobValue

_PADDINGS = ("fixed", "packed")
_NAMES = {"lora.r": "lora_r", "lora.alpha": "lora_alpha", "lora.dropout": "lora_dropout"}
_RENAMED = {"per_device_train_batch_size": "micro_batch_size", "optim": "optimizer"}
_PRECISION = "bf16: true trains bf16 weights under autocast there, fp16: true fp16 weights"


def axolotl(best: BestConfig) -> Export:
    """Its ``torch_compile`` keys would compile the whole model with errors suppressed; its own launcher is
    Accelerate's, which overwrites the environment, hence python or torchrun."""
    asked = fields(best)
    implementation, of_attention = attention(asked)
    padding = asked["padding"] if asked["padding"] in _PADDINGS else "longest"
    keys = {
        **{_RENAMED.get(name, name): value for name, value in arguments(best).items() if name != "use_cpu"},
        "bf16": str(asked["precision"]).startswith("bf16"),
        "fp16": asked["precision"] == "fp16-mixed",
        **checkpointing(asked),
        "sequence_len": asked["sequence_length"],
        "sample_packing": padding == "packed",
        "pad_to_sequence_len": padding == "fixed",
        "attn_implementation": implementation,
        **adapters(asked, _NAMES, adapter=asked["method"], lora_target_linear=True),
        **({"load_in_4bit": True} if asked["method"] == "qlora" else {}),
    }
    runs: dict[str, KnobValue | None] = {**told(asked), **of_attention, "padding": padding}
    why = {}
    if asked["precision"] != "fp32":
        runs["precision"], why["precision"] = None, _PRECISION
    return of_trainer(best, keys, runs=runs, why=why, start=f"{launcher(asked)} -m axolotl.cli.train FILE")
