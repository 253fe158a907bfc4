"""Which configs are the same, which are in a study's space, and in which order."""

from __future__ import annotations

import pytest

from autocompile.knob_table import KNOBS
from autocompile.search import candidates, canonical
from autocompile.search.canonical import in_space, key, known_to_fail, ladder, starting_point, without_compile
from autocompile.space import load_space, parse_space
from tests.unit.search_cases import CPU, EAGER, GRAPHS, LAYER, config, facts, spec

NO_EAGER = parse_space(
    """
format: 1
parameters:
  scope: {choices: [layer], default: layer, why: tests}
  micro_batch: {low: 2, high: 8, scale: log2, default: 4, why: tests}
""",
    source="tests",
)


def test_canonical_keeps_every_knob_in_the_tables_order():
    assert list(canonical({"mode": "default", "scope": "layer"})) == list(KNOBS)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        pytest.param({"scope": "none", "mode": "max-autotune"}, {}, True, id="eager has no mode"),
        pytest.param({"scope": "none", "cache_size_limit": 64}, {}, True, id="eager has no recompile limit"),
        pytest.param({"scope": "none", "sdpa": "math"}, {}, False, id="eager has an attention kernel"),
        pytest.param({"scope": "none", "micro_batch": 8}, {}, False, id="eager has a micro-batch"),
        pytest.param({"scope": "layer", "mode": "max-autotune"}, {"scope": "layer"}, False, id="compile has a mode"),
        pytest.param({"scope": "*.q_proj", "fullgraph": True}, {"scope": "*.q_proj"}, False, id="a pattern compiles"),
        pytest.param(
            {"scope": "layer", "backend": "aot_eager", "mode": "max-autotune", "combo_kernels": True},
            {"scope": "layer", "backend": "aot_eager"},
            True,
            id="inductor's settings are no other backend's",
        ),
        pytest.param(
            {"scope": "layer", "backend": "cudagraphs", "activation_memory_budget": 0.5},
            {"scope": "layer", "backend": "cudagraphs"},
            True,
            id="a backend without that partitioner",
        ),
        pytest.param(
            {"scope": "layer", "max_autotune_gemm_backends": "ATEN"},
            {"scope": "layer"},
            True,
            id="nothing is autotuned",
        ),
        pytest.param(
            {"scope": "layer", "mode": "max-autotune", "coordinate_descent_tuning": True},
            {"scope": "layer", "mode": "max-autotune"},
            True,
            id="on with autotuning anyway",
        ),
        pytest.param(
            {"scope": "model", "compiled_loss": True}, {"scope": "model"}, True, id="a compiled model holds its loss"
        ),
        pytest.param({"scope": "layer", "compiled_loss": True}, {"scope": "layer"}, False, id="compiled layers do not"),
        pytest.param(
            {"scope": "layer", "deepspeed.compile": True, "deepspeed.deepcompile": True},
            {"scope": "layer", "deepspeed.compile": False, "deepspeed.deepcompile": False},
            True,
            id="an engine compiles the whole model",
        ),
        pytest.param(
            {"parallel": "zero2", "scope": "model", "deepspeed.compile": False, "deepspeed.deepcompile": True},
            {"parallel": "zero2", "scope": "model", "deepspeed.compile": False, "deepspeed.deepcompile": False},
            True,
            id="DeepCompile is the engine's",
        ),
        pytest.param(
            {"parallel": "zero2", "scope": "model", "deepspeed.compile": True},
            {"parallel": "zero2", "scope": "model", "deepspeed.compile": False},
            False,
            id="an engine compiles in another way",
        ),
    ],
)
def test_configs_are_the_same_if_they_train_alike(left, right, same):
    assert (canonical(left) == canonical(right)) is same
    assert (key(left) == key(right)) is same


def test_without_compile_all_else_is_kept():
    eager = without_compile(config(scope="layer", mode="reduce-overhead", micro_batch=16, sdpa="flash"))
    assert eager == config(micro_batch=16, sdpa="flash")


@pytest.mark.parametrize(
    ("settings", "pair"),
    [
        pytest.param({}, None, id="eager"),
        pytest.param({"gradient_checkpointing": True}, None, id="eager with checkpointing"),
        pytest.param({"scope": "layer", "mode": "reduce-overhead"}, None, id="CUDA graphs alone"),
        pytest.param({"scope": "layer", "sdpa": "flash"}, None, id="flash per layer"),
        pytest.param(
            {"scope": "layer", "mode": "max-autotune-no-cudagraphs", "gradient_checkpointing": True},
            None,
            id="autotuning without graphs",
        ),
        pytest.param(
            {"scope": "layer", "mode": "max-autotune", "gradient_checkpointing": True},
            "CUDA graphs with gradient checkpointing",
            id="CUDA graphs with checkpointing",
        ),
        pytest.param(
            {"scope": "model", "sdpa": "flash"},
            "forced flash attention in a whole-model trace",
            id="flash in a whole-model trace",
        ),
        pytest.param(
            {"scope": "nested", "sdpa": "flash"},
            "forced flash attention in a whole-model trace",
            id="flash in one with equal layers shared",
        ),
        pytest.param(
            {"scope": "model", "sdpa": "flash", "implicit_causal_mask": True}, None, id="flash where no mask is made"
        ),
        pytest.param(
            {"scope": "layer", "backend": "cudagraphs", "gradient_checkpointing": True},
            "CUDA graphs with gradient checkpointing",
            id="the backend of CUDA graphs",
        ),
    ],
)
def test_the_pair_that_is_known_to_fail_is_named(settings, pair):
    assert known_to_fail(config(**settings)) == pair


def test_candidates_are_distinct_and_canonical():
    found = candidates(spec(), facts())
    assert len({key(c) for c in found}) == len(found) > 100
    assert all(canonical(c) == c for c in found)


def test_pairs_known_to_fail_come_last():
    known = [known_to_fail(c) is not None for c in candidates(spec(), facts())]
    assert any(known) and known == sorted(known)


def test_candidates_of_the_same_study_are_enumerated_once():
    study, known = spec(), facts()
    assert candidates(study, known) is candidates(study, known)


def test_the_shipped_space_has_far_fewer_candidates_on_a_cpu():
    study = spec(space=load_space("default"))
    assert 10 * len(candidates(study, facts(CPU))) < len(candidates(study, facts())) < 20_000


@pytest.mark.parametrize(
    ("study", "known", "knob", "values"),
    [
        pytest.param(spec(), facts(), "micro_batch", {1, 2, 4, 8, 16}, id="all of the space"),
        pytest.param(spec(pinned={"micro_batch": 8}), facts(), "micro_batch", {8}, id="a pinned knob"),
        pytest.param(spec(pinned={"micro_batch": 3}), facts(), "micro_batch", {3}, id="pinned outside the space"),
        pytest.param(
            spec(), facts(frozen_knobs={"micro_batch": "fixed"}), "micro_batch", {4}, id="a knob the workload freezes"
        ),
        pytest.param(spec(workload={"global_batch": 8}), facts(), "micro_batch", {1, 2, 4, 8}, id="divisors of 8"),
        pytest.param(spec(workload={"global_batch": 6}), facts(), "micro_batch", {1, 2}, id="divisors of 6"),
        pytest.param(spec(pinned={"scope": "layer"}), facts(), "scope", {"layer"}, id="a pinned scope"),
        pytest.param(spec(), facts(CPU), "mode", {"default"}, id="modes on a CPU"),
    ],
)
def test_candidates_take_only_legal_values(study, known, knob, values):
    assert {c[knob] for c in candidates(study, known)} == values


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(spec(space=NO_EAGER), id="the space has no scope none"),
        pytest.param(spec(pinned={"scope": "layer"}), id="the scope is pinned"),
    ],
)
def test_eager_counts_as_legal_though_no_candidate_is(study):
    assert EAGER not in candidates(study, facts())
    assert in_space(study, facts(), EAGER)
    assert ladder(study, facts(), EAGER)[-1] == max(c["micro_batch"] for c in candidates(study, facts()))


@pytest.mark.parametrize(
    ("study", "size"),
    [
        pytest.param(spec(), 4, id="the default"),
        pytest.param(spec(pinned={"micro_batch": 16}), 16, id="the pinned one"),
        pytest.param(spec(workload={"global_batch": 6}), 2, id="the largest smaller one that divides"),
        pytest.param(spec(workload={"global_batch": 64}), 4, id="the default divides"),
    ],
)
def test_the_starting_point_has_a_legal_micro_batch(study, size):
    assert starting_point(study, facts())["micro_batch"] == size


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        pytest.param(LAYER, [1, 2, 4, 8, 16], id="all sizes"),
        pytest.param(config(scope="attention", fullgraph=True), [4], id="not in the space: its own size alone"),
        pytest.param(GRAPHS, [1, 2, 4, 8, 16], id="CUDA graphs"),
    ],
)
def test_ladder(settings, sizes):
    assert ladder(spec(), facts(), settings) == sizes


@pytest.mark.parametrize(
    ("regions", "scopes", "checkpointing"),
    [
        pytest.param(None, {"none", "layer", "model", "attention"}, {False, True}, id="nobody looked"),
        pytest.param({"layer": "blocks.*"}, {"none", "layer", "model"}, {False, True}, id="layers without attention"),
        pytest.param({"attention": "*.attn"}, {"none", "model", "attention"}, {False}, id="attention without layers"),
        pytest.param({}, {"none", "model"}, {False}, id="no parts at all"),
    ],
)
def test_what_the_model_has_no_part_for_is_no_candidate(regions, scopes, checkpointing):
    found = candidates(spec(), facts(regions=regions))
    assert {config["scope"] for config in found} == scopes
    assert {config["gradient_checkpointing"] for config in found} == checkpointing
