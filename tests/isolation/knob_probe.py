"""Run configs on small models and print, as one JSON line each, what ran: the oracle of the knob tests.

Usage: knob_probe.py CASE...  Cases are listed in CASES. One process, dynamo reset in between.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.compile_fx
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autocompile.knob_table import KNOBS, KnobValue
from autocompile.knobs import Setup, apply_config, default_regions
from autocompile.slice.telemetry import CompileObserver, sdpa_kernels
from autocompile.space import defaults


class Toy(nn.Module):
    """Two blocks of different width, so that they are no equal modules; ``breaks`` makes each break its graph."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ToyBlock(8, breaks), ToyBlock(16, breaks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block(x).sum() for block in self.blocks)


class ToyBlock(nn.Module):
    def __init__(self, width: int, breaks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(x).relu()


def llama(layers: int = 2) -> tuple[nn.Module, list[Callable[[nn.Module], torch.Tensor]]]:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="sdpa",
    )
    ids = torch.randint(0, 64, (2, 32))
    return LlamaForCausalLM(config).train(), [lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss] * 2


def sequences(n_sizes: int) -> tuple[nn.Module, list[Callable[[nn.Module], torch.Tensor]]]:
    return Toy(), [lambda model, size=size: model(torch.ones(2, size, 4)) for size in range(2, 2 + n_sizes)] * 2


def toy(n_sizes: int = 1, breaks: bool = False) -> tuple[nn.Module, list[Callable[[nn.Module], torch.Tensor]]]:
    return Toy(breaks), [lambda model, size=size: model(torch.ones(size, 4)) for size in range(2, 2 + n_sizes)] * 2


def adapted_llama() -> tuple[nn.Module, list[Callable[[nn.Module], torch.Tensor]]]:
    from peft import LoraConfig, get_peft_model

    model, losses = llama()
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"])).train(), losses


def noisy() -> tuple[nn.Module, list[Callable[[nn.Module], torch.Tensor]]]:
    def loss(model: nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        return model(torch.ones(64, 4))

    model = Toy()
    for block in model.blocks:
        block.linear = nn.Sequential(block.linear, nn.Dropout(0.5))
    return model, [loss] * 2


def case(build: Callable[[], Any], **knobs: KnobValue) -> tuple[Callable[[], Any], dict[str, KnobValue]]:
    return build, knobs


CASES = {
    "eager": case(llama),
    "eager, one layer": case(lambda: llama(layers=1)),
    "eager math": case(llama, sdpa="math"),
    "eager checkpointed": case(llama, gradient_checkpointing=True),
    "layer": case(llama, scope="layer"),
    "model": case(lambda: llama(layers=1), scope="model"),
    "attention": case(llama, scope="attention"),
    "model, implicit mask": case(lambda: llama(layers=1), scope="model", implicit_causal_mask=True),
    "eager's own attention": case(llama, sdpa="eager"),
    "layer, compiled loss": case(llama, scope="layer", compiled_loss=True),
    "attention flash": case(llama, scope="attention", sdpa="flash"),
    "attention math": case(llama, scope="attention", sdpa="math"),
    "attention checkpointed": case(llama, scope="attention", gradient_checkpointing=True),
    "mlp": case(llama, scope="mlp"),
    "nested": case(lambda: llama(layers=4), scope="nested"),
    "nested checkpointed": case(llama, scope="nested", gradient_checkpointing=True),
    "qkv": case(llama, scope="qkv"),
    "lora": case(adapted_llama, scope="lora"),
    "aot_eager": case(llama, scope="mlp", backend="aot_eager", mode="reduce-overhead"),
    "layer, a quarter kept": case(llama, scope="layer", activation_memory_budget=0.25),
    "tuned": case(
        llama,
        scope="mlp",
        mode="max-autotune-no-cudagraphs",
        coordinate_descent_tuning=True,
        epilogue_fusion=False,
        shape_padding=False,
        combo_kernels=True,
        max_autotune_gemm_backends="ATEN",
    ),
    "noisy eager": case(noisy),
    "noisy": case(noisy, scope="layer"),
    "noisy fallback_random": case(noisy, scope="layer", fallback_random=True),
    "pattern": case(llama, scope="*.q_proj"),
    "pattern reduce-overhead": case(llama, scope="*.q_proj", mode="reduce-overhead"),
    "auto, five sizes": case(lambda: toy(5), scope="layer"),
    "marked, five sizes": case(lambda: sequences(5), scope="layer", dynamic="marked"),
    "static, five sizes": case(lambda: toy(5), scope="layer", dynamic="false"),
    "symbolic, five sizes": case(lambda: toy(5), scope="layer", dynamic="true"),
    "static, five sizes, limit 2": case(lambda: toy(5), scope="layer", dynamic="false", cache_size_limit=2),
    "breaks": case(lambda: toy(breaks=True), scope="layer"),
    "breaks, fullgraph": case(lambda: toy(breaks=True), scope="layer", fullgraph=True),
}


INDUCTOR: list[dict[str, Any]] = []  # what its settings were while it compiled
compile_fx = torch._inductor.compile_fx.compile_fx


def watched(*args: Any, **kwargs: Any) -> Any:
    names = (name for name, knob in KNOBS.items() if knob.inductor and name != "mode")
    INDUCTOR.append({name: getattr(torch._inductor.config, name) for name in names})
    return compile_fx(*args, **kwargs)


torch._inductor.compile_fx.compile_fx = watched


def observe(build: Callable[[], Any], knobs: dict[str, KnobValue]) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = 1.0
    INDUCTOR.clear()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, losses = build()
    with CompileObserver() as observer:
        regions = default_regions(model) | ({"layer": "blocks.*"} if isinstance(model, Toy) else {})
        setup = apply_config(Setup(model=model, regions=regions), {**defaults(), **knobs})
        keys_and_classes = [(name, type(module).__name__) for name, module in model.named_modules()]
        error, total = None, 0.0
        try:
            for loss in losses:
                step = loss(model)
                step.backward()
                total += float(step)
        except Exception as caught:  # noqa: BLE001  its name is what is printed
            error = type(caught).__name__
        telemetry, limit_hits = observer.telemetry(setup), observer.limit_hits()
        cost = observer.compile_cost()
        traced = torch._dynamo.utils.counters["stats"].copy()
        with torch.profiler.profile() as profile:
            if error is None:
                losses[0](model).backward()
    names = [event.name for event in profile.events() or []]
    return {
        "error": error,
        "loss": total,
        "keys": list(model.state_dict()),
        "classes": keys_and_classes,
        "telemetry": telemetry.model_dump(mode="json"),
        "limit_hits": limit_hits,
        "cache": cost.cache,
        "traced_calls": traced["calls_captured"],
        "traced_graphs": traced["unique_graphs"],
        "inductor": INDUCTOR[-1] if INDUCTOR else None,
        "kernels": list(sdpa_kernels(names)),
        "attention_forwards": sum(
            "_scaled_dot_product" in n and "fused" not in n and "backward" not in n for n in names
        ),
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print("PROBE " + json.dumps({"case": name, **observe(*CASES[name])}), flush=True)
