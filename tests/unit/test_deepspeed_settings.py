"""A user's own DeepSpeed JSON: what a study takes of it, what it decides itself, and what it cannot take."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from autocompile.deepspeed_settings import fixed_part, idle_knobs, knobs_of, misfits, precision_of, replaced
from autocompile.errors import UserError
from autocompile.settings import Settings, read_spec, study_spec

TRAINERS = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2e8, "allgather_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": 32,
}


def test_what_deepspeed_gets_of_a_trainers_file():
    assert fixed_part(TRAINERS) == {
        "fp16": {"loss_scale": 0},
        "bf16": {},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2e8},
        "steps_per_print": 2000,
    }
    assert replaced(TRAINERS) == ["optimizer", "scheduler", "train_batch_size"]
    assert knobs_of(TRAINERS) == {"deepspeed.overlap_comm": True, "deepspeed.reduce_bucket_size": 200_000_000}
    assert precision_of(TRAINERS) is None
    assert list(misfits(TRAINERS, stage=2, precision="bf16")) == []


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        pytest.param({"bf16": {"enabled": True}}, "bf16", id="bf16"),
        pytest.param({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16-mixed", id="autocast"),
        pytest.param({"bf16": {"enabled": False}}, "fp32", id="neither"),
        pytest.param({"bf16": {"enabled": "auto"}}, None, id="whatever is asked for"),
        pytest.param({"fp16": {"enabled": False}}, None, id="not fp16"),
    ],
)
def test_the_precision_that_a_file_leaves(config, precision):
    assert precision_of(config) == precision


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        pytest.param({"zero_optimisation": {}}, "zero_optimisation: DeepSpeed has no such section", id="misspelt"),
        pytest.param({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: expected 1", id="another stage"),
        pytest.param({"zero_optimization": True}, "zero_optimization: expected an object", id="the old way to say it"),
        pytest.param({"fp16": {"enabled": True}}, "fp16.enabled: ", id="fp16"),
        pytest.param({"bf16": {"enabled": False}}, "bf16: expected what --precision bf16", id="without its precision"),
        pytest.param(
            {"torch_autocast": {"enabled": True}}, "torch_autocast: expected what --precision bf16", id="autocast"
        ),
        pytest.param(
            {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype: ", id="autocast to fp16"
        ),
        pytest.param(
            {"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 and torch_autocast: ", id="both"
        ),
        pytest.param({"optimizer": {"type": "Lamb"}}, 'optimizer.type: expected AdamW, .*, found "Lamb"', id="Lamb"),
        pytest.param(
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device: expected none or cpu",
            id="offload to a disk",
        ),
        pytest.param(
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param: ZeRO stage 1 has nothing",
            id="offload of what is not sharded",
        ),
        pytest.param(
            {"zero_optimization": {"overlap_comm": 1}}, "zero_optimization.overlap_comm: expected", id="no boolean"
        ),
        pytest.param(
            {"zero_optimization": {"reduce_bucket_size": 0.5}},
            "zero_optimization.reduce_bucket_size: expected a whole number",
            id="half an element",
        ),
        pytest.param(
            {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: not covered", id="another way to train"
        ),
    ],
)
def test_what_a_study_cannot_take(config, complaint):
    (found,) = misfits(config, stage=1, precision="bf16")
    assert re.match(complaint, found), found


@pytest.mark.parametrize(
    ("knobs", "stage", "device", "complaints"),
    [
        pytest.param({"overlap_comm": True}, 1, "cpu", [], id="reduced during the backward pass"),
        pytest.param({"overlap_comm": True}, 0, "cpu", ["overlap_comm"], id="stage 0 reduces at the end"),
        pytest.param({"reduce_bucket_size": 5}, 0, None, ["reduce_bucket_size"], id="in buckets of one size"),
        pytest.param({"overlap_comm": False}, 3, "cpu", ["overlap_comm"], id="no streams"),
        pytest.param({"overlap_comm": False}, 3, "cuda", [], id="streams"),
        pytest.param({"overlap_comm": "auto", "reduce_bucket_size": 500_000_000}, 0, "cpu", [], id="the defaults"),
        pytest.param({"allgather_bucket_size": 5}, 2, "cuda", ["allgather_bucket_size"], id="not looked at"),
        pytest.param({"compile": True, "deepcompile": True}, 1, "cpu", ["deepcompile"], id="no CUDA"),
        pytest.param({"compile": True, "deepcompile": True}, 0, "cuda", ["deepcompile"], id="not at stage 0"),
        pytest.param({"compile": True}, 1, "cpu", [], id="an engine that compiles"),
        pytest.param({"compile": False, "deepcompile": True}, 1, "cpu", [], id="off anyway"),
        pytest.param({"compile": True, "deepcompile": True}, 3, "cuda", [], id="DeepCompile"),
    ],
)
def test_knobs_that_would_change_nothing(knobs, stage, device, complaints):
    config = {f"deepspeed.{name}": value for name, value in knobs.items()}
    found = list(idle_knobs(config, {}, stage=stage, device=device))
    assert [line.split(":")[0] for line in found] == [f"deepspeed.{name}" for name in complaints]


def test_what_the_users_own_file_says_goes_on_to_deepspeed():
    user = {"zero_optimization": {"allgather_bucket_size": 2e8, "overlap_comm": True}}
    assert list(idle_knobs(knobs_of(user), user, stage=0, device="cpu")) == []


@pytest.fixture
def asked(tmp_path):
    """The study for a file of this content, on two processes."""

    def ask(content, **settings):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        given = {"model": "tiny-llama", "parallel": "zero2", "gpus_per_trial": 2, "device": "cpu", **settings}
        return study_spec(Settings(deepspeed_config=str(path), **given))

    return ask


def test_the_file_is_kept_by_its_content_and_fixes_knobs(asked):
    spec = asked(TRAINERS)
    assert spec.workload.deepspeed_config == TRAINERS
    assert spec.pinned == {"deepspeed.overlap_comm": True, "deepspeed.reduce_bucket_size": 200_000_000}
    assert asked({**TRAINERS, "steps_per_print": 1}).hash() != spec.hash()
    assert asked(json.dumps(TRAINERS, indent=4)).hash() == spec.hash()


def test_a_stored_spec_needs_no_file(asked, tmp_path):
    spec = asked(TRAINERS)
    stored = tmp_path / "spec.yaml"
    stored.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    (tmp_path / "ds.json").unlink()
    assert read_spec(stored) == spec


def test_what_a_file_fixes_may_be_idle_beside_a_pin(asked):
    spec = asked({"compile": {"deepcompile": True}}, set=["scope=layer"], device="cuda")
    assert spec.pinned == {"scope": "layer", "deepspeed.deepcompile": True}


def test_a_spec_files_settings_are_named_by_their_place(asked, tmp_path):
    data = asked(TRAINERS).model_dump(mode="json")
    data["workload"]["deepspeed_config"]["zero_optimization"]["stage"] = 1
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(
        UserError, match=r"spec\.yaml: workload\.deepspeed_config: zero_optimization\.stage: expected 2"
    ):
        read_spec(tmp_path / "spec.yaml")


def test_the_file_decides_the_precision_where_no_flag_does(asked):
    assert asked({"bf16": {"enabled": True}}).workload.precision == "bf16"
    assert asked({"bf16": {"enabled": "auto"}}).workload.precision is None


@pytest.mark.parametrize(
    ("content", "settings", "complaint"),
    [
        pytest.param("[1]", {}, "ds.json: expected a JSON object, found a list", id="no object"),
        pytest.param('{\n"a": }', {}, "ds.json:2: expected DeepSpeed's JSON: ", id="no JSON"),
        pytest.param(
            {}, {"parallel": "ddp"}, "ds.json: these are DeepSpeed's settings: give --parallel zero0", id="ddp"
        ),
        pytest.param(TRAINERS, {"parallel": "zero3"}, "ds.json: zero_optimization.stage: expected 3", id="a stage"),
        pytest.param(
            TRAINERS,
            {"set": ["deepspeed.overlap_comm=false"]},
            "--set deepspeed.overlap_comm=false: ",
            id="a knob that the file fixes to another value",
        ),
        pytest.param(
            {"bf16": {"enabled": True}}, {"precision": "fp32"}, "ds.json: bf16: expected what", id="precision"
        ),
        pytest.param(
            {}, {"set": ["deepspeed.allgather_bucket_size=7"]}, "deepspeed.allgather_bucket_size: ", id="not looked at"
        ),
        pytest.param(
            {},
            {"set": ["deepspeed.deepcompile=true"]},
            "deepspeed.deepcompile=true: means nothing without deepspeed.compile=true",
            id="DeepCompile alone",
        ),
        pytest.param(
            {},
            {"set": ["deepspeed.compile=true", "scope=layer"]},
            "deepspeed.compile: DeepSpeed's engine compiles the whole model: it means nothing without scope=model",
            id="an engine compiles the whole model",
        ),
    ],
)
def test_wrong_input_is_one_line(asked, content, settings, complaint):
    with pytest.raises(UserError) as caught:
        asked(content, **settings)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there():
    settings = Settings(model="tiny-llama", parallel="zero2", gpus_per_trial=2, deepspeed_config="nowhere.json")
    with pytest.raises(UserError, match=r"nowhere\.json: cannot be read"):
        study_spec(settings)


def test_a_knob_of_deepspeed_means_nothing_elsewhere():
    with pytest.raises(UserError, match="means nothing without --parallel zero0 or zero1 or zero2 or zero3"):
        study_spec(Settings(model="tiny-llama", set=["deepspeed.compile=true"]))
