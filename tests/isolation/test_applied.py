"""A best-config file in a plain training script: the graphs of the study, and a clear word where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autocompile
from autocompile.best_file import BestConfig, save
from autocompile.errors import ConfigMismatch, UserError
from autocompile.records import Measured
from autocompile.slice.environment import environment
from autocompile.space import defaults
from autocompile.spec import Method, WorkloadSpec
from autocompile.tuner.folders import copy_seed
from tests.isolation.studies import trained_plainly


def best(knobs: dict[str, Any], **made_for: Any) -> BestConfig:
    here = environment(torch.device("cpu"))
    spec = WorkloadSpec(model="tiny-llama", method=Method.FULL, sequence_length=32)
    fits = {"gpu": "none", "torch": ".".join(here["torch"].split(".")[:2]), "triton": None, "method": "full"}
    rest = {"model_type": "llama", "parallel": "none", "world_size": 1, "sequence_length": 32}
    return BestConfig.model_validate(
        {
            "study": "s",
            "result": "win",
            "config": {**defaults(), "micro_batch": 2, **knobs},
            "expected": {
                "tokens_per_second": [1, 1, 1],
                "step_seconds": [1, 1, 1],
                "peak_memory_bytes": 1,
                "compile_seconds": 1,
                "graphs": 1,
            },
            "evidence": {"speedup": 1, "speedup_vs_best_eager": 1, "confirmed_by": [1], "break_even_steps": 1},
            "made_for": {**fits, **rest, **made_for},
            "workload": {"micro_batch": 2, "gradient_accumulation": 1, "precision": "fp32", "spec": spec.model_dump()},
        }
    )


@pytest.mark.timeout(300)
def test_a_plain_script_compiles_the_graphs_that_the_slice_did(measure, tmp_path: Path, inductor_seed: Path) -> None:
    knobs = {"scope": "attention", "gradient_checkpointing": True}
    workload = WorkloadSpec(model="tiny-llama", method=Method.FULL, sequence_length=32)
    outcome = measure(workload, numerics=False, **knobs)
    assert isinstance(outcome, Measured), outcome
    save(best(knobs), tmp_path / "best.yaml")
    found, said = trained_plainly(tmp_path / "best.yaml", cache=tmp_path / "another" / "cache")
    assert found["hashes"] == [list(region.code_hashes) for region in outcome.telemetry.regions] != []
    assert set(found["knobs"]) >= set(defaults())
    assert found["before"] and not found["warnings"]
    assert found["calls"] == {"attention:LlamaAttention": 8}  # two layers, two steps, each recomputed once
    flash = ["_scaled_dot_product_flash_attention_for_cpu"]
    assert found["kernels"] == found["compiled_kernels"] == flash
    assert found["same_keys"]
    assert "left to your script: feed 2 samples" in said


def yours_of(tmp_path: Path, parallel: str, **knobs: Any) -> Any:
    save(best({name.replace("__", "."): value for name, value in knobs.items()}, parallel=parallel), tmp_path / "b")
    return autocompile.apply(Net(), tmp_path / "b")


def test_what_a_script_has_to_tell_deepspeed(tmp_path: Path) -> None:
    knobs = {"deepspeed__overlap_comm": True, "deepspeed__reduce_bucket_size": 1000, "deepspeed__compile": True}
    found = yours_of(tmp_path, "zero1", scope="model", **knobs)
    lines = [found.yours[f"deepspeed.{name}"] for name in ("overlap_comm", "reduce_bucket_size", "compile")]
    assert lines == [
        '"zero_optimization": {"overlap_comm": true} in DeepSpeed\'s config',
        '"zero_optimization": {"reduce_bucket_size": 1000} in DeepSpeed\'s config',
        'after deepspeed.initialize: engine.compile(backend="inductor", '
        "compile_kwargs={'fullgraph': False, 'dynamic': None})",
    ]
    assert found.setup.model._compiled_call_impl is None
    assert not found.check().warnings  # what the engine compiles cannot be seen from here
    assert set(found.yours) | set(found.applied) >= set(defaults())


def test_what_a_script_has_to_tell_fsdp(tmp_path: Path) -> None:
    found = yours_of(tmp_path, "fsdp", fsdp__param_dtype="bf16")
    assert found.yours["fsdp.param_dtype"] == (
        "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), the root's too"
    )
    assert found.applied["fsdp.reduce_dtype"] == "as it is"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.config = type("Config", (), {"model_type": "llama"})()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("gpu", "NVIDIA H200", id="another GPU"),
        pytest.param("torch", "1.0", id="another torch"),
        pytest.param("triton", "3.7", id="another triton"),
        pytest.param("method", "lora", id="another method"),
        pytest.param("model_type", "gpt2", id="another model type"),
        pytest.param("world_size", 8, id="another world size"),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, value: object
) -> None:
    save(best({}, **{field: value}), tmp_path / "best.yaml")
    model = Net()
    with pytest.raises(ConfigMismatch, match=f"made_for.{field}: the study ran with {value}"):
        autocompile.apply(model, tmp_path / "best.yaml")
    autocompile.apply(model, tmp_path / "best.yaml", strict=False)
    assert f"made_for.{field}" in caplog.text


def test_a_model_that_is_compiled_or_has_run_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(best({}), tmp_path / "best.yaml")
    model = Net()
    model.layers[0].compile(backend="eager")
    model.layers[1].weight.grad = torch.zeros(4, 4)
    autocompile.apply(model, tmp_path / "best.yaml")
    assert "layers.0 is compiled already" in caplog.text and "has run already" in caplog.text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("format: 2", "format", id="another format"),
        pytest.param("a: [", "not YAML", id="no YAML"),
        pytest.param("format: 1", "study: Field required", id="fields missing"),
    ],
)
def test_a_file_that_is_no_best_config_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "best.yaml").write_text(text)
    with pytest.raises(UserError, match=complaint):
        autocompile.load(tmp_path / "best.yaml")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        autocompile.load(tmp_path / "none.yaml")


class Blocks(torch.nn.Module):
    """Two unequal blocks, so two groups of one class; only the first is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 8), torch.nn.Linear(4, 16)])
        self.config = type("Config", (), {"model_type": "llama"})()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).sum()


def test_check_names_what_was_not_called_and_another_length(
    tmp_path: Path, inductor_seed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_seed(inductor_seed, tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    save(best({"scope": "layers.*"}), tmp_path / "best.yaml")
    model = Blocks()
    applied = autocompile.apply(model, tmp_path / "best.yaml")
    model(torch.ones(2, 7, 4)).backward()
    check = applied.check()
    assert check.calls == {"layers.*:Linear": 1, "layers.*:Linear#2": 0}
    assert check.graphs == {"layers.*:Linear": 1, "layers.*:Linear#2": 0}
    assert check.warnings == (
        "layers.*:Linear#2 was never called, so it runs eager",
        "sequence length 7: the study measured 32",
    )


def test_check_names_what_has_as_many_graphs_as_it_may(
    tmp_path: Path, inductor_seed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_seed(inductor_seed, tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    save(best({"scope": "layers.*", "dynamic": "false", "cache_size_limit": 2}), tmp_path / "best.yaml")
    model = Blocks()
    applied = autocompile.apply(model, tmp_path / "best.yaml")
    for size in (3, 5, 7):
        model(torch.ones(size, 4)).backward()
    (warning,) = (text for text in applied.check().warnings if "graphs" in text)
    assert warning == "layers.*:Linear has 2 graphs, which is its cache_size_limit: for what comes after it runs eager"


class Tower(torch.nn.Module):
    """Two equal blocks between layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.config = type("Config", (), {"model_type": "llama"})()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its inputs
@pytest.mark.parametrize("scope", ["model", "layer"])
def test_weights_of_a_compiled_model_fit_a_plain_one(
    tmp_path: Path, inductor_seed: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    copy_seed(inductor_seed, tmp_path / "cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    save(best({"scope": scope}), tmp_path / "best.yaml")
    model, plain, inputs = Tower(), Tower(), torch.ones(2, 32, 4)
    applied = autocompile.apply(model, tmp_path / "best.yaml")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs).backward()
    optimizer.step()
    graphs = applied.check().graphs
    assert list(graphs) == [f"{scope}:{'Tower' if scope == 'model' else 'Linear'}"] and all(graphs.values())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt")
    assert not [key for key in weights if "_orig_mod" in key]
    plain.load_state_dict(weights, strict=True)
    assert plain(inputs).item() == pytest.approx(model(inputs).item())


def test_a_scope_that_the_model_does_not_have_changes_nothing(tmp_path: Path) -> None:
    save(best({"scope": "attention", "sdpa": "math"}), tmp_path / "best.yaml")
    before = torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(ConfigMismatch, match="scope attention: no module"):
        autocompile.apply(Net(), tmp_path / "best.yaml")
    assert torch.backends.cuda.flash_sdp_enabled() == before
