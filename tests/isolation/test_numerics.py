"""Real slices whose loss and gradients are compared with fp32 eager: what passes, and what is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autocompile.records import Failed, Measured, Numerics
from autocompile.spec import LoraSpec, Method, Precision, WorkloadSpec
from tests.workload_examples.gradients import FAULTY

ROOT = Path(__file__).parents[2]
GRADIENTS = ROOT / "tests" / "workload_examples" / "gradients.py"
SPACE = """
format: 1
parameters:
  scope: {choices: [none, layer], default: none, why: a test}
  micro_batch: {choices: [2], default: 2, why: a test}
"""


def script(fault: str = "", *, function: str = "build", **fields) -> WorkloadSpec:
    return WorkloadSpec(script=f"{GRADIENTS}:{function}", options={"fault": fault}, **fields)


def numerics(outcome) -> Numerics:
    assert isinstance(outcome, Measured), outcome
    assert outcome.telemetry.numerics is not None
    return outcome.telemetry.numerics


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("method", "scope"),
    [pytest.param(Method.FULL, "layer"), pytest.param(Method.QLORA, "mlp")],
)
def test_compiled_bf16_training_is_as_close_to_fp32_as_eager_s(measure, method: Method, scope: str) -> None:
    lora = LoraSpec(dropout=0.1)
    workload = WorkloadSpec(
        model="tiny-llama", method=method, precision=Precision.BF16, sequence_length=32, lora=lora, global_batch=4
    )
    outcome = measure(workload, scope=scope)
    found = numerics(outcome)
    assert (found.checked, found.steps) == (True, 3)
    assert found.note == (None if method is Method.FULL else "dropout was off")
    assert [deviation.quantity for deviation in found.worst[:2]] == ["loss", "gradients"]
    assert ("lora_" in found.worst[2].quantity) == (method is not Method.FULL)
    for deviation in found.worst[1:]:
        assert deviation.error is not None and 0 < deviation.error <= deviation.limit < 0.15
        assert 1e-3 < deviation.eager_error < 0.05  # that of bf16 arithmetic
    # What was timed is told, without what the copies compiled.
    assert outcome.telemetry.compile_applied == "all"
    assert outcome.telemetry.graphs == sum(region.graphs for region in outcome.telemetry.regions) == 1


def test_a_gradient_that_is_overwritten_instead_of_accumulated_is_named(measure) -> None:
    """The loss is eager's. CUDA graphs have done this to gradients without an error (pytorch#96693)."""
    outcome = measure(script("overwritten", global_batch=4), scope="layer")
    assert isinstance(outcome, Failed), outcome
    failure = outcome.failure
    assert (failure.kind, failure.stage) == ("numerics_mismatch", "check")
    assert FAULTY in failure.message and "the loss" not in failure.message
    assert outcome.telemetry.compile_applied == "all"
    assert outcome.telemetry.numerics is not None
    loss, gradients, parameter = outcome.telemetry.numerics.worst
    assert (loss.is_beyond, gradients.is_beyond, parameter.is_beyond) == (False, True, True)


def test_code_that_keeps_the_weights_it_was_compiled_with_is_found(measure) -> None:
    """Its loss and gradients are right until an optimizer changes the weights."""
    outcome = measure(script("stale"), scope="layer")
    assert isinstance(outcome, Failed), outcome
    assert outcome.failure.kind == "numerics_mismatch"
    assert "the loss: relative error" in outcome.failure.message


def test_masks_that_differ_from_eager_s_are_no_mismatch(measure) -> None:
    found = numerics(measure(script("two dropouts"), scope="layer"))
    assert found.checked
    assert found.note == "dropout was off; random numbers beside dropout as in eager"


def test_bf16_whose_values_are_a_sixteenth_apart_is_no_mismatch(measure) -> None:
    """The script ignores ctx.dtype, so it is bf16 in a study of fp32; compiled, it keeps fp32 between its products."""
    found = numerics(measure(script(function="rotary"), scope="layer"))
    assert found.checked
    assert all(deviation.eager_error > 1e-3 for deviation in found.worst[1:])


def test_an_eager_knob_is_compared_too(measure) -> None:
    found = numerics(measure(script(), gradient_checkpointing=True))
    assert found.checked
    assert [deviation.error for deviation in found.worst] == [0, 0, 0]  # recomputed alike


@pytest.mark.timeout(300)
def test_the_fastest_config_is_not_exported_if_its_gradients_are_wrong(tmp_path: Path, inductor_seed: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    shutil.copytree(inductor_seed, tmp_path / "studies" / ".seed")
    what = ("--workload", f"{GRADIENTS}:build", "--set", "workload.fault=scaled", "--search-space", "space.yaml")
    words = (*what, "--device", "cpu", "--trials", "2", "--budget", "150s", "--study", "wrong", "--json")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autocompile", "tune", *words]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    compiled = [trial for trial in document["trials"] if trial["config"]["scope"] == "layer"]
    assert [(trial["state"], trial["failure"]["kind"]) for trial in compiled] == [("PRUNED", "numerics_mismatch")]
    assert FAULTY in compiled[0]["failure"]["message"]
    best = yaml.safe_load((tmp_path / "studies" / "wrong" / "best.yaml").read_text())
    assert best["config"]["scope"] == document["verdict"]["config"]["scope"] == "none"
