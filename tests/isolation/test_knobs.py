"""Each knob, by what ran: kernel names, graphs, guards and hashes of output code, cold, warm and in another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autocompile.knob_table import KNOBS

pytestmark = pytest.mark.timeout(600)  # the first test waits for all cases to compile

PROBE = Path(__file__).parent / "knob_probe.py"
REPOSITORY = Path(__file__).parents[2]


def probe(cache: Path, *cases: str) -> dict[str, dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), *cases],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line.removeprefix("PROBE ") for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    assert done.returncode == 0, done.stderr[-2000:]
    return {found["case"]: found for found in map(json.loads, lines)}


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory, inductor_seed: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Every case from a cache that holds no compiled code, only the probe of the CPU's vector instructions."""
    cache = tmp_path_factory.mktemp("inductor") / "cache"
    shutil.copytree(inductor_seed, cache)
    return cache, probe(cache)


@pytest.fixture(scope="module")
def runs(cold: tuple[Path, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    cache, first = cold
    return {"cold": first, "warm": probe(cache)}


@pytest.fixture(params=["cold", "warm"])
def seen(request: pytest.FixtureRequest, runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return runs[request.param]


def hashes(found: dict[str, Any]) -> list[str]:
    return [code for region in found["telemetry"]["regions"] for code in region["code_hashes"]]


def region_names(found: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(region["name"], region["modules"], region["graphs"]) for region in found["telemetry"]["regions"]]


def test_the_first_run_is_cold_and_the_second_warm(runs: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert runs["cold"]["mlp"]["cache"] == "cold"
    assert runs["warm"]["mlp"]["cache"] == "warm"


def test_output_code_hashes_are_the_same_cold_and_warm(runs: dict[str, dict[str, dict[str, Any]]]) -> None:
    compiled = [name for name, found in runs["cold"].items() if hashes(found)]
    assert len(compiled) > 10
    for name in compiled:
        assert hashes(runs["cold"][name]) == hashes(runs["warm"][name]), name


def test_output_code_hashes_are_the_same_in_another_folder(
    tmp_path: Path, inductor_seed: Path, cold: tuple[Path, dict[str, dict[str, Any]]]
) -> None:
    shutil.copytree(inductor_seed, tmp_path / "other" / "folder")
    elsewhere = probe(tmp_path / "other" / "folder", "mlp")
    assert hashes(elsewhere["mlp"]) == hashes(cold[1]["mlp"]) != []


@pytest.mark.parametrize(
    ("case", "regions"),
    [
        pytest.param("eager", [], id="none compiles nothing"),
        pytest.param("model", [("model:LlamaForCausalLM", 1, 1)], id="model"),
        pytest.param("layer", [("layer:LlamaDecoderLayer", 2, 1)], id="layers share one graph"),
        pytest.param("attention", [("attention:LlamaAttention", 2, 1)], id="attention"),
        pytest.param("mlp", [("mlp:LlamaMLP", 2, 1)], id="mlp"),
        pytest.param("nested", [("nested:LlamaForCausalLM", 1, 1)], id="nested"),
        pytest.param("nested checkpointed", [("nested:LlamaForCausalLM", 1, 1)], id="nested, each layer checkpointed"),
        pytest.param("qkv", [("qkv:Linear", 6, 1)], id="the projections of attention"),
        pytest.param("lora", [("lora:Linear", 2, 2), ("lora:Linear#2", 2, 1)], id="adapters, two graphs of the first"),
        pytest.param("pattern", [("*.q_proj:Linear", 2, 1)], id="a pattern, on a torch.nn class"),
    ],
)
def test_scope_is_what_was_compiled(
    seen: dict[str, dict[str, Any]], case: str, regions: list[tuple[str, int, int]]
) -> None:
    assert region_names(seen[case]) == regions
    assert seen[case]["telemetry"]["compile_applied"] == ("all" if regions else "none")


def test_compile_in_place_keeps_keys_classes_and_losses(seen: dict[str, dict[str, Any]]) -> None:
    for case in ("model", "layer", "attention", "mlp", "pattern"):
        plain = seen["eager, one layer" if case == "model" else "eager"]
        assert seen[case]["keys"] == plain["keys"]
        assert seen[case]["classes"] == plain["classes"]
        assert seen[case]["loss"] == pytest.approx(plain["loss"], rel=1e-4)


def test_equal_layers_of_a_nested_trace_are_one_piece_of_code(seen: dict[str, dict[str, Any]]) -> None:
    """Four layers, and hardly more calls in the graph than a whole model of one layer has."""
    assert seen["nested"]["traced_calls"] < 1.3 * seen["model"]["traced_calls"]
    assert not seen["nested"]["telemetry"]["graph_breaks"]
    assert seen["nested checkpointed"]["loss"] == pytest.approx(seen["eager"]["loss"], rel=1e-5)
    assert seen["nested checkpointed"]["keys"] == seen["eager"]["keys"]


def test_a_backend_without_kernels_generates_none_and_has_no_mode(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["aot_eager"]["telemetry"]["compile_applied"] == "all"
    assert not hashes(seen["aot_eager"]) and not seen["aot_eager"]["telemetry"]["cudagraph_skips"]
    assert seen["aot_eager"]["loss"] == pytest.approx(seen["eager"]["loss"], rel=1e-5)


def test_inductor_compiles_with_the_settings_asked_for(seen: dict[str, dict[str, Any]]) -> None:
    asked = {
        "coordinate_descent_tuning": True,
        "epilogue_fusion": False,
        "shape_padding": False,
        "combo_kernels": True,
        "max_autotune_gemm_backends": "ATEN",
        "fallback_random": False,
    }
    assert seen["tuned"]["inductor"] == asked
    defaults = {name: KNOBS[name].default for name in asked}
    assert seen["mlp"]["inductor"] == defaults  # torch's own are the table's, and nothing leaks from another config


def test_a_smaller_budget_of_activations_makes_other_code(seen: dict[str, dict[str, Any]]) -> None:
    assert hashes(seen["layer, a quarter kept"]) != hashes(seen["layer"])
    assert seen["layer, a quarter kept"]["loss"] == pytest.approx(seen["layer"]["loss"], rel=1e-6)


def test_random_numbers_fall_back_to_those_of_eager(seen: dict[str, dict[str, Any]]) -> None:
    eager = seen["noisy eager"]["loss"]
    assert seen["noisy fallback_random"]["loss"] == pytest.approx(eager, rel=1e-5)
    assert seen["noisy"]["loss"] != pytest.approx(eager, rel=1e-5)


def test_cuda_graphs_are_asked_for_and_skipped_on_a_cpu(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["pattern reduce-overhead"]["telemetry"]["cudagraph_skips"]
    assert not seen["pattern"]["telemetry"]["cudagraph_skips"]


def test_fullgraph_turns_a_break_into_an_error(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["breaks, fullgraph"]["error"] == "Unsupported"
    assert seen["breaks"]["error"] is None
    assert "knob_probe.py:" in seen["breaks"]["telemetry"]["graph_breaks"][0]["where"]


@pytest.mark.parametrize(
    ("case", "graphs"),
    [
        pytest.param("auto, five sizes", 4, id="auto: static, then symbolic, for each of two blocks"),
        pytest.param("marked, five sizes", 2, id="marked: symbolic at once where sequences differ"),
        pytest.param("symbolic, five sizes", 2, id="true: symbolic at once"),
        pytest.param("static, five sizes", 10, id="false: one for each size"),
    ],
)
def test_dynamic_decides_how_many_graphs(seen: dict[str, dict[str, Any]], case: str, graphs: int) -> None:
    assert seen[case]["telemetry"]["graphs"] == graphs
    assert all("size mismatch" in recompile["guard"] for recompile in seen[case]["telemetry"]["recompiles"])


def test_cache_size_limit_leaves_the_rest_eager(seen: dict[str, dict[str, Any]]) -> None:
    assert not seen["static, five sizes"]["limit_hits"]
    limited = seen["static, five sizes, limit 2"]
    assert limited["limit_hits"] and limited["telemetry"]["graphs"] == 4
    assert limited["telemetry"]["compile_applied"] == "some"


def test_groups_of_unequal_modules_do_not_share_a_limit(seen: dict[str, dict[str, Any]]) -> None:
    assert [graphs for _, _, graphs in region_names(seen["static, five sizes"])] == [5, 5]


def test_sdpa_decides_the_kernel_eager_and_compiled(seen: dict[str, dict[str, Any]]) -> None:
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert seen["eager"]["kernels"] == seen["attention"]["kernels"] == seen["attention flash"]["kernels"] == [flash]
    assert seen["eager math"]["kernels"] == ["_scaled_dot_product_attention_math"]
    assert flash not in seen["attention math"]["kernels"]
    assert hashes(seen["attention math"]) != hashes(seen["attention flash"])
    assert seen["attention math"]["telemetry"]["sdpa_applied"] == "region"


def test_other_attention_than_torch_s_kernels(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["eager's own attention"]["kernels"] == []
    assert seen["eager's own attention"]["loss"] == pytest.approx(seen["eager"]["loss"], rel=1e-5)


def test_an_implicit_mask_makes_other_code_and_the_same_loss(seen: dict[str, dict[str, Any]]) -> None:
    assert hashes(seen["model, implicit mask"]) != hashes(seen["model"])
    assert seen["model, implicit mask"]["loss"] == pytest.approx(seen["model"]["loss"], rel=1e-5)


def test_the_loss_is_compiled_beside_the_layers(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["layer, compiled loss"]["traced_graphs"] == seen["layer"]["traced_graphs"] + 1
    assert seen["layer, compiled loss"]["loss"] == pytest.approx(seen["layer"]["loss"], rel=1e-5)
    assert region_names(seen["layer, compiled loss"]) == [*region_names(seen["layer"]), ("ForCausalLMLoss", 0, 1)]
    assert seen["layer, compiled loss"]["telemetry"]["graph_breaks"] == []


def test_checkpointing_runs_each_layers_attention_twice(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["eager checkpointed"]["attention_forwards"] == 2 * seen["eager"]["attention_forwards"]
    assert seen["attention checkpointed"]["attention_forwards"] == 2 * seen["attention"]["attention_forwards"]
    assert seen["eager checkpointed"]["loss"] == seen["eager"]["loss"]
    assert seen["attention checkpointed"]["telemetry"]["checkpointing"] == "outside"
