"""What DeepCompile runs on two GPUs: torch's launcher starts this, the first rank prints it as JSON."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from tests.isolation.zero_probe import Stepped, device


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.cuda.set_device(device())
    found = {}
    for stage in (1, 3):
        for on in (False, True):
            stepped = Stepped(stage, scope="model", deepspeed__compile=True, deepspeed__deepcompile=on)
            names = sorted({name for name in stepped.operators if name.startswith("dc::")})
            found[f"{stage} {on}"] = {"active": stepped.engine.is_deepcompile_active(), "operators": names}
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
