"""The worked examples go wrong and right in the way that their texts say."""

from __future__ import annotations

from pathlib import Path

import pytest

from autocompile.records import Failed, Measured
from autocompile.spec import WorkloadSpec

EXAMPLES = Path(__file__).parents[2] / "studies" / "examples"

pytestmark = pytest.mark.timeout(300)


def example(place: str, **options: int) -> WorkloadSpec:
    return WorkloadSpec(script=f"{EXAMPLES / place}", sequence_length=16, options=options)


def test_an_attribute_that_changes_at_each_call_is_a_storm_that_names_it(measure) -> None:
    workload = example("changing_attribute.py:build", width=64, layers=2)
    found = measure(workload, scope="layer", cache_size_limit=4, numerics=False)
    assert isinstance(found, Failed) and found.failure.kind == "recompile_storm"
    assert any(".step ==" in recompile.guard for recompile in found.telemetry.recompiles)


def test_as_a_tensor_it_is_one_graph(measure) -> None:
    found = measure(example("changing_attribute.py:cured", width=64, layers=2), scope="layer", numerics=False)
    assert isinstance(found, Measured), found
    assert (found.telemetry.graphs, found.telemetry.recompiles) == (1, ())


def test_modes_that_are_mixed_up_cost_graphs_and_are_named(measure) -> None:
    found = measure(example("resnet_cifar10.py:mixed_up", width=8), scope="layer", numerics=False)
    assert isinstance(found, Measured), found
    assert any("training" in recompile.guard for recompile in found.telemetry.recompiles)
