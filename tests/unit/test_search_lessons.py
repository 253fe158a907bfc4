"""What a failure rules out, what it must not, and which skipped configs are worth telling."""

from __future__ import annotations

import pytest

from autocompile.failure_texts import CUDAGRAPH_LIVENESS, GPU_TOO_OLD
from autocompile.records import Failed, FailureKind
from autocompile.search import derived
from autocompile.search.lessons import lessons, reason_against
from tests.unit.search_cases import (
    EAGER,
    GRAPHS,
    LAYER,
    MODEL,
    SMALL_SPACE,
    config,
    facts,
    failed,
    measured,
    spec,
    stopped,
)

K = FailureKind
FULLGRAPH = config(scope="layer", fullgraph=True)


@pytest.mark.parametrize(
    ("kind", "broken", "other", "skipped"),
    [
        pytest.param(K.OOM, {"micro_batch": 16}, {"micro_batch": 32}, True, id="oom: a larger micro-batch"),
        pytest.param(K.OOM, {"micro_batch": 16}, {"micro_batch": 8}, False, id="oom: not a smaller one"),
        pytest.param(
            K.OOM,
            {"micro_batch": 16},
            {"micro_batch": 16, "gradient_checkpointing": True},
            False,
            id="oom: checkpointing",
        ),
        pytest.param(K.OOM, {"micro_batch": 16}, {"micro_batch": 16, "scope": "layer"}, False, id="oom: another scope"),
        pytest.param(
            K.OOM, {"scope": "layer"}, {"scope": "layer", "fullgraph": True}, True, id="oom: what takes the same memory"
        ),
        pytest.param(
            K.GRAPH_BREAK,
            {"scope": "layer", "fullgraph": True},
            {"scope": "layer", "fullgraph": True, "micro_batch": 1, "mode": "max-autotune"},
            True,
            id="graph break: every fullgraph of the scope",
        ),
        pytest.param(
            K.GRAPH_BREAK,
            {"scope": "layer", "fullgraph": True},
            {"scope": "layer"},
            False,
            id="graph break: not without",
        ),
        pytest.param(
            K.GRAPH_BREAK,
            {"scope": "layer", "fullgraph": True},
            {"scope": "attention", "fullgraph": True},
            False,
            id="graph break: not another scope",
        ),
        pytest.param(
            K.BACKEND_UNSUPPORTED, {"sdpa": "cudnn"}, {"sdpa": "cudnn", "scope": "layer"}, True, id="backend: same mask"
        ),
        pytest.param(
            K.BACKEND_UNSUPPORTED,
            {"sdpa": "efficient", "scope": "model"},
            {"sdpa": "efficient", "scope": "layer"},
            False,
            id="backend: a whole-model trace has another mask",
        ),
        pytest.param(K.BACKEND_UNSUPPORTED, {"sdpa": "cudnn"}, {"sdpa": "math"}, False, id="backend: another one"),
        pytest.param(
            K.BACKEND_UNSUPPORTED,
            {"scope": "layer"},
            {"scope": "layer", "micro_batch": 8},
            True,
            id="backend: the compiler",
        ),
        pytest.param(K.BACKEND_UNSUPPORTED, {"scope": "layer"}, {}, False, id="backend: not eager where the compiler"),
        pytest.param(
            K.RECOMPILE_STORM,
            {"scope": "layer", "cache_size_limit": 64},
            {"scope": "layer", "cache_size_limit": 8, "micro_batch": 1},
            True,
            id="storm: a lower limit",
        ),
        pytest.param(
            K.RECOMPILE_STORM,
            {"scope": "layer", "cache_size_limit": 8},
            {"scope": "layer", "cache_size_limit": 64},
            False,
            id="storm: not a higher limit",
        ),
        pytest.param(
            K.RECOMPILE_STORM, {"scope": "layer"}, {"scope": "layer", "dynamic": "true"}, False, id="storm: not dynamic"
        ),
        pytest.param(
            K.RECOMPILE_STORM,
            {"scope": "layer", "padding": "longest"},
            {"scope": "layer", "padding": "fixed"},
            False,
            id="storm: not where batches have one width",
        ),
        pytest.param(
            K.BACKEND_UNSUPPORTED,
            {"scope": "model", "sdpa": "flash"},
            {"scope": "model", "sdpa": "flash", "implicit_causal_mask": True},
            False,
            id="backend: not where no mask is made",
        ),
        pytest.param(
            K.BACKEND_UNSUPPORTED,
            {"sdpa": "flash", "padding": "packed"},
            {"sdpa": "flash", "padding": "longest"},
            False,
            id="backend: not for want of packing",
        ),
        pytest.param(
            K.COMPILE_TIMEOUT,
            {"scope": "layer", "coordinate_descent_tuning": True},
            {"scope": "layer"},
            False,
            id="timeout: not what is tuned less",
        ),
        pytest.param(
            K.COMPILE_TIMEOUT,
            {"scope": "model"},
            {"scope": "model", "mode": "max-autotune"},
            True,
            id="timeout: heavier",
        ),
        pytest.param(
            K.COMPILE_TIMEOUT,
            {"scope": "model", "mode": "max-autotune"},
            {"scope": "model"},
            False,
            id="timeout: lighter",
        ),
        pytest.param(K.COMPILE_TIMEOUT, {"scope": "model"}, {"scope": "layer"}, False, id="timeout: another scope"),
        pytest.param(
            K.COMPILE_ERROR,
            {"scope": "layer", "mode": "reduce-overhead", "gradient_checkpointing": True},
            {"scope": "model", "mode": "max-autotune", "gradient_checkpointing": True, "micro_batch": 1},
            True,
            id="a pair known to fail: its kind",
        ),
        pytest.param(
            K.OOM,
            {"scope": "layer", "mode": "reduce-overhead", "gradient_checkpointing": True, "micro_batch": 16},
            {"scope": "layer", "mode": "reduce-overhead", "gradient_checkpointing": True},
            False,
            id="a pair known to fail: not for want of memory",
        ),
        pytest.param(
            K.COMPILE_ERROR, {"scope": "layer"}, {"scope": "layer", "micro_batch": 8}, False, id="other errors"
        ),
        pytest.param(K.HOST_OOM, {"micro_batch": 4}, {"micro_batch": 8}, False, id="host memory"),
        pytest.param(
            K.NUMERICS_MISMATCH, {"scope": "layer"}, {"scope": "layer", "mode": "max-autotune"}, False, id="losses"
        ),
    ],
)
def test_a_failure_rules_out_what_it_proves_and_nothing_else(kind, broken, other, skipped):
    reason = reason_against(lessons([failed(7, config(**broken), kind)]), config(**other))
    assert (reason is not None) is skipped
    assert reason is None or "trial 7" in reason


@pytest.mark.parametrize(
    ("subkind", "kind", "broken", "other", "skipped"),
    [
        pytest.param(
            GPU_TOO_OLD,
            K.BACKEND_UNSUPPORTED,
            {"scope": "layer", "sdpa": "flash"},
            {"scope": "mlp"},
            True,
            id="no compiler",
        ),
        pytest.param(
            GPU_TOO_OLD,
            K.BACKEND_UNSUPPORTED,
            {"scope": "layer", "sdpa": "flash"},
            {"sdpa": "flash"},
            False,
            id="eager",
        ),
        pytest.param(
            CUDAGRAPH_LIVENESS,
            K.COMPILE_ERROR,
            {"scope": "layer", "mode": "reduce-overhead"},
            {"scope": "layer", "mode": "max-autotune", "micro_batch": 8},
            True,
            id="a kept output: all CUDA graphs of the scope",
        ),
        pytest.param(
            CUDAGRAPH_LIVENESS,
            K.COMPILE_ERROR,
            {"scope": "layer", "mode": "reduce-overhead"},
            {"scope": "layer", "mode": "max-autotune-no-cudagraphs"},
            False,
            id="a kept output: not without CUDA graphs",
        ),
        pytest.param(
            CUDAGRAPH_LIVENESS,
            K.COMPILE_ERROR,
            {"scope": "layer", "mode": "reduce-overhead"},
            {"scope": "model", "mode": "reduce-overhead"},
            False,
            id="a kept output: not another scope",
        ),
    ],
)
def test_what_a_failure_of_a_narrower_kind_rules_out(subkind, kind, broken, other, skipped):
    record = failed(7, config(**broken), kind)
    outcome = Failed(failure=record.failure.model_copy(update={"subkind": subkind}))
    reason = reason_against(lessons([record.model_copy(update={"outcome": outcome})]), config(**other))
    assert (reason is not None) is skipped


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(stopped(0, LAYER, "budget"), id="ended by the budget"),
        pytest.param(
            failed(0, LAYER, K.COMPILE_TIMEOUT).model_copy(update={"stopped": stopped(0, LAYER, "budget").stopped}),
            id="a compile that the budget cut short",
        ),
        pytest.param(stopped(0, LAYER, "interrupted"), id="interrupted"),
        pytest.param(stopped(0, LAYER, "lost"), id="lost with its coordinator"),
        pytest.param(failed(0, LAYER, K.GPU_FAULT), id="the machine broke"),
        pytest.param(
            failed(0, LAYER, K.OOM).model_copy(update={"stopped": stopped(0, LAYER, "budget").stopped}), id="cut"
        ),
        pytest.param(measured(0, LAYER, 9000), id="measured"),
    ],
)
def test_what_did_not_fail_by_itself_teaches_nothing(record):
    assert reason_against(lessons([record]), config(scope="layer", micro_batch=16)) is None


def test_the_smallest_failure_counts():
    records = [failed(0, config(micro_batch=16), K.OOM), failed(1, config(micro_batch=8), K.OOM)]
    assert "trial 1" in (reason_against(lessons(records), config(micro_batch=8)) or "")


@pytest.mark.parametrize(
    ("study", "records", "skipped"),
    [
        pytest.param(spec(), [measured(0, EAGER, 9000)], [], id="nothing failed"),
        pytest.param(
            spec(),
            [measured(0, EAGER, 9000), failed(1, FULLGRAPH, K.GRAPH_BREAK)],
            [],
            id="a large space is not listed",
        ),
        pytest.param(
            spec(pinned={"gradient_checkpointing": True}),
            [measured(0, {**EAGER, "gradient_checkpointing": True}, 9000)],
            [{**GRAPHS, "gradient_checkpointing": True}],
            id="a pair known to fail",
        ),
        pytest.param(
            spec(workload={"global_batch": 16}), [measured(0, EAGER, 9000)], [], id="what is not in the space at all"
        ),
        pytest.param(
            spec(space=SMALL_SPACE),
            [measured(0, EAGER, 9000), failed(1, LAYER, K.OOM)],
            [config(scope="layer", micro_batch=8)],
            id="a small space is listed",
        ),
    ],
)
def test_derived_lists_what_was_skipped_for_a_reason(study, records, skipped):
    found = derived(study, facts(), records)
    assert [entry.config for entry in found] == skipped
    assert all(entry.source == "skipped" and entry.reason for entry in found)


def test_derived_names_the_plain_compile_that_memory_did_not_hold():
    records = [measured(0, EAGER, 9000), failed(1, config(scope="model", micro_batch=2), K.OOM)]
    assert derived(spec(), facts(), records)[0].config == MODEL
