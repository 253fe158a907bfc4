"""A training script as users have it, with one line of autocompile; prints what was compiled and what was checked.

Usage: plain_training.py BEST.yaml
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autocompile
from autocompile.catalogue import catalogue
from autocompile.slice.telemetry import CompileObserver

best = autocompile.load(sys.argv[1])
entry = catalogue()["tiny-llama"]
config = AutoConfig.for_model(entry.model_type, **{**entry.config, "num_hidden_layers": 2})
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
keys = list(model.state_dict())

with CompileObserver() as observer:
    applied = autocompile.apply(model, sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        ids = torch.randint(0, config.vocab_size, (best.workload.micro_batch, best.made_for.sequence_length))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    before = applied.check().warnings
    step()
    telemetry = observer.telemetry(applied.setup)
    without_a_step = applied.check()
    check = applied.check(step)

found = {
    "hashes": [region.code_hashes for region in telemetry.regions],
    "knobs": sorted({*applied.applied, *applied.yours}),
    "before": before,
    "calls": dict(check.calls),
    "warnings": check.warnings,
    "kernels": check.sdpa_kernels,
    "compiled_kernels": without_a_step.sdpa_kernels,
    "same_keys": list(model.state_dict()) == keys,
}
print("APPLIED " + json.dumps(found))
