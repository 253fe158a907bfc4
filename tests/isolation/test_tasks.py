"""Real slices of what is no causal language model: encoders and vision, each with its own regions and batches."""

from __future__ import annotations

import pytest

from autocompile.records import Measured
from autocompile.spec import Task, WorkloadSpec
from autocompile.workloads.job import EPOCH_LENGTHS

pytestmark = pytest.mark.timeout(300)


def measured(outcome) -> Measured:
    assert isinstance(outcome, Measured), outcome
    assert outcome.telemetry.numerics is None or outcome.telemetry.numerics.checked
    return outcome


def test_a_masked_language_model_compiles_per_layer(measure) -> None:
    workload = WorkloadSpec(model="tiny-bert", sequence_length=32, mask="padding")
    found = measured(measure(workload, scope="layer"))
    assert [(region.name, region.graphs) for region in found.telemetry.regions] == [("layer:BertLayer", 1)]
    assert found.telemetry.mask == "padding"
    assert found.measurement.unit == "tokens"
    assert found.telemetry.numerics.note == "dropout was off"


@pytest.mark.parametrize(
    ("padding", "graphs"),
    [pytest.param("longest", 2, id="the second width makes a size symbolic"), pytest.param("fixed", 1, id="one width")],
)
def test_padding_decides_how_many_graphs_sequences_of_many_lengths_need(measure, padding: str, graphs: int) -> None:
    workload = WorkloadSpec(model="tiny-bert", sequence_length=64, lengths="uniform:20-64")
    found = measured(measure(workload, scope="layer", micro_batch=8, padding=padding, numerics=False))
    assert found.telemetry.graphs == graphs
    assert found.telemetry.recompiles_in_window == 0
    assert found.telemetry.mask == "padding"
    assert found.measurement.step_seconds.n % (EPOCH_LENGTHS // 8) == 0  # whole passes, also where all have one width


def test_packed_sequences_are_measured_and_checked(measure) -> None:
    workload = WorkloadSpec(model="tiny-llama", sequence_length=64, lengths="uniform:8-40")
    found = measured(measure(workload, scope="layer", padding="packed"))
    assert found.telemetry.mask == "packed"
    assert found.telemetry.graphs == 1 and found.telemetry.recompiles_in_window == 0
    assert found.telemetry.numerics is not None


def test_the_stages_of_a_convolutional_network_differ_so_each_has_a_graph(measure) -> None:
    found = measured(
        measure(WorkloadSpec(model="tiny-resnet", image_size=32), scope="layer", channels_last=True, numerics=False)
    )
    regions = {region.name: region.graphs for region in found.telemetry.regions}
    assert len(regions) == 4 and set(regions.values()) == {1}
    assert found.measurement.unit == "samples"


def test_images_and_sequences_are_classified_eagerly_too(measure) -> None:
    found = measured(measure(WorkloadSpec(model="tiny-vit"), sdpa="math"))
    assert found.telemetry.sdpa_applied == "region"
    assert found.measurement.unit == "samples"


def test_an_encoder_is_trained_as_a_classifier(measure) -> None:
    workload = WorkloadSpec(model="tiny-bert", task=Task.CLASSIFICATION, sequence_length=32)
    assert measured(measure(workload)).measurement.unit == "tokens"
