"""DeepSpeed's DeepCompile, which needs CUDA and several GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(600),
]


def test_deepcompile_puts_messages_into_the_graphs() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, "-m", "tests.gpu.deepcompile_probe"],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
        timeout=570,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), "")
    assert line, done.stderr[-2000:]
    found = json.loads(line.removeprefix("FOUND "))
    for stage in (1, 3):
        assert found[f"{stage} False"] == {"active": False, "operators": []}
        assert found[f"{stage} True"]["active"]
        assert any("reduce_grad" in name for name in found[f"{stage} True"]["operators"])
