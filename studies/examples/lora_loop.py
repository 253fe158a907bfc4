"""A plain LoRA loop, before and after a best config: `python lora_loop.py [BEST.yaml]`.

Without an argument it trains eagerly; with one, `autocompile.apply` compiles the model as the study measured it.
"""

from __future__ import annotations

import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import autocompile

SIZES = {  # of a Llama-2-7B cut to a few layers on a GPU, and of the catalogue's tiny-llama on a CPU
    "cuda": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "cpu": {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4},
}
WARM_STEPS = 10  # compiled by then
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main(best: str | None, *, steps: int = 30, micro_batch: int = 4, length: int = 128) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[device], num_hidden_layers=4, use_cache=False)
    model = LlamaForCausalLM(config).to(device, dtype)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LINEAR, task_type="CAUSAL_LM"))
    model.train()

    applied = None
    if best is not None:
        settings = autocompile.load(best)
        micro_batch = settings.workload.micro_batch
        applied = autocompile.apply(model, best)  # after PEFT and .to(), before the first call

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    began = time.perf_counter()
    for step in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        ids = torch.randint(0, config.vocab_size, (micro_batch, length), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM_STEPS:
            loss.item()  # waits for the device
            began = time.perf_counter()
    loss.item()
    seconds = (time.perf_counter() - began) / (steps - WARM_STEPS - 1)
    how = "compiled" if best else "eager"
    print(f"{how}: {seconds * 1000:.1f} ms a step, {micro_batch * length / seconds:.0f} tokens/s")
    if applied is not None:
        print(applied.check())


if __name__ == "__main__":
    main(*sys.argv[1:2] or [None])
