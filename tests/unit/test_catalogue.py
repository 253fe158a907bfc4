"""The catalogue says what transformers' own config classes and the published models say."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autocompile.catalogue import catalogue, source_of
from autocompile.errors import UserError
from autocompile.spec import WorkloadSpec
from autocompile.workloads.models import describe

PUBLISHED_PARAMETERS = {
    "llama2-7b": 6.74e9,
    "llama2-13b": 13.0e9,
    "llama3-8b": 8.03e9,
    "llama3.2-1b": 1.24e9,
    "llama3.2-3b": 3.21e9,
    "qwen2.5-0.5b": 0.49e9,
    "qwen2.5-7b": 7.62e9,
    "gpt2": 124e6,
    "gpt2-medium": 355e6,
    "gpt2-large": 774e6,
    "gpt2-xl": 1.56e9,
    "bert-base": 110e6,
    "bert-large": 336e6,
    "roberta-base": 125e6,
    "resnet-18": 11.7e6,
    "resnet-50": 25.6e6,
    "vit-b16": 86.6e6,
}


def test_every_published_model_is_listed() -> None:
    assert {name for name, entry in catalogue().items() if entry.hub} == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", catalogue())
def test_the_config_class_knows_every_argument(name: str) -> None:
    entry = catalogue()[name]
    config_class = CONFIG_MAPPING[entry.model_type]
    assert entry.config.keys() <= {field.name for field in dataclasses.fields(config_class)}
    config = AutoConfig.for_model(entry.model_type, **entry.config)
    for key, value in entry.config.items():
        assert getattr(config, key) == value, key


@pytest.mark.parametrize("name", catalogue())
def test_the_model_has_the_stated_number_of_parameters(name: str) -> None:
    entry = catalogue()[name]
    found = describe(WorkloadSpec(model=name, sequence_length=128))
    assert (found.parameters, found.task) == (entry.parameters, entry.task)
    assert entry.parameters == pytest.approx(PUBLISHED_PARAMETERS.get(name, entry.parameters), rel=0.01)


def test_it_is_read_without_torch() -> None:
    code = "import sys; from autocompile.catalogue import catalogue; catalogue(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("model", "source"),
    [
        pytest.param("llama2-7b", "catalogue", id="a name of the catalogue"),
        pytest.param("meta-llama/Llama-2-7b-hf", "hub", id="owner and name"),
        pytest.param("{folder}", "directory", id="a directory that exists"),
    ],
)
def test_source(model: str, source: str, tmp_path: object) -> None:
    assert source_of(model.format(folder=tmp_path)) == source


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        pytest.param("lama2-7b", "did you mean llama2-7b", id="a slip of the pen"),
        pytest.param("Llama2-7B", "did you mean llama2-7b", id="other capitals"),
        pytest.param("./not-here", "known: llama2-7b, ", id="a directory that does not exist"),
        pytest.param("a/b/c", "known: llama2-7b, ", id="a path, not owner and name"),
    ],
)
def test_an_unknown_model_is_named_with_the_nearest(model: str, hint: str) -> None:
    with pytest.raises(UserError, match="expected a catalogue name") as caught:
        source_of(model)
    assert f'found "{model}"; {hint}' in str(caught.value)
