"""Real slices in real processes: what is measured, what each fault is called, and that telemetry comes along."""

from __future__ import annotations

from pathlib import Path

import pytest

from autocompile.knob_table import KnobValue
from autocompile.records import Failed, Measured
from autocompile.spec import Method, WorkloadSpec

FAULTS = Path(__file__).parents[1] / "workload_examples" / "faults.py"


def llama(method: Method, **fields) -> WorkloadSpec:
    return WorkloadSpec(model="tiny-llama", method=method, sequence_length=32, **fields)


def script(fault: str) -> WorkloadSpec:
    return WorkloadSpec(script=f"{FAULTS}:build", options={"fault": fault})


@pytest.mark.timeout(300)
def test_a_compiled_slice_tells_what_it_ran(measure) -> None:
    """The first layer's input needs no gradient, which makes another graph of it."""
    outcome = measure(llama(Method.LORA), scope="layer", fullgraph=True, numerics=False)
    assert isinstance(outcome, Measured), outcome
    measurement, telemetry = outcome.measurement, outcome.telemetry
    assert (telemetry.compile_applied, telemetry.graphs, telemetry.mask) == ("all", 2, "none")
    assert [region.modules for region in telemetry.regions] == [2]
    assert telemetry.sdpa_kernels == ("_scaled_dot_product_flash_attention_for_cpu",)
    assert measurement.compile.cache == "cold" and measurement.compile.seconds > 0
    assert measurement.tokens_per_second == pytest.approx(2 * 32 / measurement.step_seconds.median)
    assert not measurement.degraded and not telemetry.recompiles_in_window


@pytest.mark.timeout(300)
def test_with_gradients_of_the_input_all_layers_share_a_graph(measure) -> None:
    outcome = measure(llama(Method.LORA), scope="layer", input_gradients=True)
    assert isinstance(outcome, Measured), outcome
    assert (outcome.telemetry.graphs, outcome.telemetry.compile_applied) == (1, "all")
    assert outcome.telemetry.numerics.checked


def test_a_global_batch_is_kept_by_accumulation(measure) -> None:
    outcome = measure(llama(Method.FULL, global_batch=8))
    assert isinstance(outcome, Measured)
    assert outcome.measurement.tokens_per_second == pytest.approx(8 * 32 / outcome.measurement.step_seconds.median)


@pytest.mark.parametrize(
    ("fault", "knobs", "kind"),
    [
        pytest.param(
            "sizes",
            {"scope": "layer", "dynamic": "false", "cache_size_limit": 2},
            "recompile_storm",
            id="a size too many",
        ),
        pytest.param("opaque", {"scope": "layer", "fullgraph": True}, "graph_break", id="what dynamo may not see"),
        pytest.param("data read", {"scope": "layer", "fullgraph": True}, "graph_break", id="data that decides"),
        pytest.param("out of memory", {}, "oom", id="out of memory in warm-up"),
        pytest.param("nan", {}, "numerics_mismatch", id="a loss that is not a number"),
        pytest.param("wrong when compiled", {"scope": "layer"}, "numerics_mismatch", id="another function compiled"),
        pytest.param("", {"scope": "*.nothing"}, "workload_error", id="a pattern that matches nothing"),
    ],
)
def test_a_fault_has_its_name_and_keeps_its_telemetry(
    measure, fault: str, knobs: dict[str, KnobValue], kind: str
) -> None:
    outcome = measure(script(fault), **knobs)
    assert isinstance(outcome, Failed), outcome
    assert outcome.failure.kind == kind, outcome.failure
    assert outcome.telemetry.environment["torch"]
    if kind == "graph_break":
        assert outcome.failure.where is not None and "faults.py:" in outcome.failure.where
    if kind == "recompile_storm":
        assert outcome.telemetry.graphs and outcome.telemetry.recompiles
    if fault == "attribute":
        assert any("width" in recompile.guard for recompile in outcome.telemetry.recompiles)


def test_a_slice_may_be_asked_to_compile_with_one_thread(measure) -> None:
    outcome = measure(script("compile threads"), compile_threads=1)
    assert isinstance(outcome, Failed)
    assert outcome.failure.message == "faults.py: build: RuntimeError: 1 compile threads"


def test_the_step_without_dropout_uses_up_no_recompile_limit(measure) -> None:
    """The first step is compared with eager, dropout off; training itself needs two graphs, and no more may count."""
    outcome = measure(script("dropout"), scope="layer", cache_size_limit=2, numerics=False)
    assert isinstance(outcome, Measured), outcome
    assert (outcome.telemetry.graphs, outcome.telemetry.compile_applied) == (2, "all")
    assert outcome.measurement.compile.seconds > 0


def test_evaluation_between_the_steps_costs_a_graph_of_its_own(measure) -> None:
    """Eval mode changes what the layers compute, and no_grad how they are traced."""
    workload = script("dropout").model_copy(update={"eval_every": 2})
    outcome = measure(workload, scope="layer", cache_size_limit=8, numerics=False)
    assert isinstance(outcome, Measured), outcome
    assert outcome.telemetry.graphs == 2 + 1  # training has two, since the first layer's input needs no gradient
    assert outcome.telemetry.recompiles_in_window == 0
    assert outcome.measurement.eval_seconds is not None and outcome.measurement.eval_seconds > 0


def test_eager_training_of_the_same_script_works(measure) -> None:
    outcome = measure(script("index"))
    assert isinstance(outcome, Measured)
    assert (outcome.telemetry.compile_applied, outcome.measurement.unit) == ("none", "samples")
