"""From what a user types to a study's spec, and the complaints on the way."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import yaml

from autocompile.assignments import split_assignments
from autocompile.cli.tune import parse_gpus, tune
from autocompile.errors import UserError
from autocompile.settings import Settings, study_spec
from autocompile.space import defaults
from tests.acceptance.test_commands import ROOT


def asked(**settings):
    return study_spec(Settings(**{"model": "tiny-llama", **settings}))


def test_defaults():
    spec = asked()
    assert spec.workload.model == "tiny-llama"
    assert (spec.budget.seconds, spec.budget.trials) == (1800.0, None)
    assert (spec.workload.method, spec.workload.precision, spec.workload.device) == (None, None, None)
    assert (spec.memory_headroom, spec.seed, spec.planned_tokens, spec.pinned) == (0.08, 0, None, {})
    assert "gradient_checkpointing" in spec.space.parameters


def test_every_setting_is_a_flag_of_tune():
    assert {field.name for field in fields(Settings)} <= set(inspect.signature(tune).parameters)


@pytest.mark.parametrize(
    ("settings", "read", "value"),
    [
        pytest.param({"budget": "1h30m"}, lambda spec: spec.budget.seconds, 5400.0, id="a budget"),
        pytest.param({"trials": 5}, lambda spec: spec.budget.trials, 5, id="a number of trials"),
        pytest.param({"method": "qlora"}, lambda spec: str(spec.workload.method), "qlora", id="a method"),
        pytest.param(
            {"search_space": "quick"}, lambda spec: set(spec.space.parameters), {"scope", "micro_batch"}, id="a space"
        ),
        pytest.param({"tokens": "50M"}, lambda spec: spec.planned_tokens, 50_000_000, id="a planned run in tokens"),
        pytest.param(
            {"steps": 10, "global_batch": 8, "seq_len": 128},
            lambda spec: (spec.planned_tokens, spec.planned_steps),
            (None, 10),
            id="a planned run in global batches",
        ),
        pytest.param({"memory_headroom": "10%"}, lambda spec: spec.memory_headroom, 0.1, id="headroom"),
        pytest.param({"sampler": "random"}, lambda spec: spec.plan.sampler, "random", id="a sampler"),
        pytest.param({"device": "cpu"}, lambda spec: spec.workload.device, "cpu", id="a device"),
        pytest.param({"weights": True}, lambda spec: spec.workload.weights, True, id="real weights"),
        pytest.param({"set": ["lora.r=64"]}, lambda spec: spec.workload.lora.r, 64, id="a field of a group"),
        pytest.param({"set": ["mask=ones"]}, lambda spec: spec.workload.mask, "ones", id="a field"),
        pytest.param({"set": ["micro_batch=2"]}, lambda spec: spec.pinned, {"micro_batch": 2}, id="a knob"),
    ],
)
def test_a_flag_arrives(settings, read, value):
    assert read(asked(**settings)) == value


@pytest.mark.parametrize(
    ("words", "pinned", "workload"),
    [
        pytest.param(["fullgraph=true"], {"fullgraph": True}, {}, id="a boolean"),
        pytest.param(["dynamic=true"], {"dynamic": "true"}, {}, id="dynamic's values are strings"),
        pytest.param(["scope=*.q_proj"], {"scope": "*.q_proj"}, {}, id="a pattern is no YAML alias"),
        pytest.param(
            ["workload.rows=3", "workload.name=x=y"],
            {},
            {"options": {"rows": 3, "name": "x=y"}},
            id="options of a script, the first equals sign divides",
        ),
        pytest.param(["workload.rate=null"], {}, {"options": {"rate": "null"}}, id="what is no scalar stays text"),
    ],
)
def test_assignments(words, pinned, workload):
    assert split_assignments(words) == (pinned, workload)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        pytest.param({"model": None}, "expected exactly one of --model, --workload and --spec", id="nothing to train"),
        pytest.param(
            {"workload": "a.py:b"}, "expected exactly one of --model, --workload and --spec", id="two of them"
        ),
        pytest.param({"model": "llama2-7bb"}, "did you mean llama2-7b", id="an unknown model"),
        pytest.param(
            {"budget": "tomorrow"}, 'budget: expected a time such as 90s, 30m or 1h30m, found "tomorrow"', id="no time"
        ),
        pytest.param({"trials": 0}, "--trials: expected a whole number from 1, found 0", id="no trials"),
        pytest.param(
            {"method": "loro"}, "--method: Input should be 'full', 'lora' or 'qlora', found 'loro'", id="no method"
        ),
        pytest.param({"sampler": "magic"}, "--sampler: Input should be", id="no sampler"),
        pytest.param({"seq_len": 1}, "--seq-len: Input should be greater than or equal to 2, found 1", id="too short"),
        pytest.param(
            {"set": ["micro_bach=1"]}, "--set micro_bach: unknown; did you mean micro_batch?", id="a misspelt knob"
        ),
        pytest.param({"set": ["micro_batch"]}, '--set: expected KEY=VALUE, found "micro_batch"', id="no value"),
        pytest.param(
            {"set": ["micro_batch=0"]}, "--set micro_batch: expected a whole number from 1, found 0", id="zero"
        ),
        pytest.param(
            {"set": ["mode=fast"]}, "--set mode: expected one of default, reduce-overhead", id="an illegal value"
        ),
        pytest.param({"set": ["lora.q=1"]}, "--set lora.q: unknown; did you mean lora.r", id="a misspelt field"),
        pytest.param({"set": ["lora.r=many"]}, "--set lora.r: Input should be a valid integer", id="a field's type"),
        pytest.param({"set": ["mask=ones", "mask=none"]}, "--set mask: given twice", id="one key twice"),
        pytest.param(
            {"set": ["sequence_length=9"]}, "--set sequence_length: unknown", id="a field with a flag of its own"
        ),
        pytest.param(
            {"set": ["workload.rows=1"]},
            "--set workload.rows: only a --workload script takes options",
            id="an option that nobody reads",
        ),
        pytest.param({"steps": 0}, "--steps: expected a whole number from 1, found 0", id="no steps"),
        pytest.param({"steps": 3}, "--steps: needs --global-batch", id="steps of unknown size"),
        pytest.param({"steps": 3, "tokens": "5M"}, "expected at most one of --tokens and --steps", id="two lengths"),
        pytest.param(
            {"global_batch": 8, "set": ["micro_batch=3"]},
            "micro_batch=3 does not divide the global batch of 8",
            id="a micro-batch that does not divide the global batch",
        ),
        pytest.param(
            {"memory_headroom": "0.1"}, "memory headroom: expected a percentage", id="a headroom without percent"
        ),
        pytest.param(
            {"precision": "fp32", "trainer": "hf"}, "what the Trainer's arguments", id="a Trainer's precision"
        ),
        pytest.param(
            {"set": ["scope=layer", "backend=aot_eager", "mode=reduce-overhead"]},
            "mode=reduce-overhead: means nothing with scope=layer backend=aot_eager",
            id="a mode of a backend without modes",
        ),
        pytest.param(
            {"set": ["scope=none", "fullgraph=true"]},
            "fullgraph=true: means nothing with scope=none",
            id="a setting of compile where nothing is compiled",
        ),
        pytest.param({"search_space": "tiny"}, "expected a file or one of causal-lm", id="no such space"),
        pytest.param(
            {"set": ["ddp.optimize_ddp=false"]},
            "ddp.optimize_ddp=false: means nothing without --parallel ddp",
            id="a knob of several GPUs on one",
        ),
        pytest.param(
            {"parallel": "fsdp", "gpus_per_trial": 2, "set": ["ddp.bucket_cap_mb=50"]},
            "ddp.bucket_cap_mb=50: means nothing without --parallel ddp",
            id="a knob of another way to train",
        ),
        pytest.param(
            {"parallel": "ddp", "gpus_per_trial": 2, "global_batch": 12, "set": ["micro_batch=4"]},
            "micro_batch=4 on each of 2 GPUs does not divide the global batch of 12",
            id="a micro-batch that does not divide a rank's share",
        ),
        pytest.param(
            {"parallel": "auto", "gpus_per_trial": 2}, "give --global-batch", id="ways that train other batches"
        ),
        pytest.param(
            {"parallel": "auto", "gpus_per_trial": 1, "global_batch": 8}, "give --gpus-per-trial 2", id="one way only"
        ),
        pytest.param({"set": ["parallel=ddp"]}, "parallel: is set by --parallel", id="a way without its GPUs"),
    ],
)
def test_wrong_input_is_one_line(settings, complaint):
    with pytest.raises(UserError) as caught:
        asked(**settings)
    assert str(caught.value).startswith(complaint) or complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def spec_file(folder, **changes):
    data = yaml.safe_load(yaml.safe_dump(asked(search_space="quick", budget="5m").model_dump(mode="json")))
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({**data, **changes}))
    return str(path)


def test_a_spec_file_asks_for_the_same_study(tmp_path):
    again = study_spec(Settings(spec=spec_file(tmp_path)))
    assert again == asked(search_space="quick", budget="5m")


def test_a_flag_comes_before_the_files_budget(tmp_path):
    path = spec_file(tmp_path, budget={"seconds": 60, "trials": 3})
    assert study_spec(Settings(spec=path)).budget.seconds == 60
    assert study_spec(Settings(spec=path, budget="2m")).budget.seconds == 120
    assert study_spec(Settings(spec=path, budget="2m")).budget.trials == 3


@pytest.mark.parametrize(
    ("flags", "planned"),
    [
        pytest.param({}, (None, 7), id="as the file says"),
        pytest.param({"tokens": "5k"}, (5000, None), id="tokens instead"),
        pytest.param({"steps": 9}, (None, 9), id="more steps"),
    ],
)
def test_a_flag_comes_before_the_files_planned_run(tmp_path, flags, planned):
    workload = {"model": "tiny-llama", "global_batch": 8}
    spec = study_spec(Settings(spec=spec_file(tmp_path, planned_steps=7, workload=workload), **flags))
    assert (spec.planned_tokens, spec.planned_steps) == planned
    assert spec.hash() == spec.model_copy(update={"planned_tokens": None, "planned_steps": None}).hash()


def test_a_spec_file_may_name_a_shipped_space(tmp_path):
    assert study_spec(Settings(spec=spec_file(tmp_path, space="quick"))) == asked(search_space="quick", budget="5m")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        pytest.param(
            {"workload": {"model": "tiny-llama", "colour": 1}}, "workload.colour: Extra inputs", id="unknown field"
        ),
        pytest.param(
            {"pinned": {"micro_bach": 1}}, "pinned.micro_bach: unknown knob; did you mean micro_batch?", id="knob"
        ),
        pytest.param({"pinned": {"mode": "fast"}}, "pinned.mode: expected one of default", id="an illegal value"),
        pytest.param({"memory_headroom": 2}, "memory_headroom: Input should be less than 1, found 2", id="too large"),
        pytest.param({"workload": {"model": "llama2-7bb"}}, "did you mean llama2-7b", id="an unknown model"),
        pytest.param(
            {"planned_tokens": 5, "planned_steps": 5},
            "at most one of planned_tokens and planned_steps",
            id="two lengths",
        ),
        pytest.param({"planned_steps": 5}, "planned_steps needs workload.global_batch", id="steps of unknown size"),
        pytest.param(
            {"space": {"format": 1, "parameters": {"mode": {"choices": "default"}}}},
            "space: parameters.mode: expected default and why, found only choices",
            id="a space read as strictly as its file",
        ),
    ],
)
def test_a_wrong_spec_file_is_named_with_the_place(tmp_path, changes, complaint):
    path = spec_file(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        study_spec(Settings(spec=path))
    assert complaint in str(caught.value)


def test_a_broken_spec_file_names_its_line(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("workload:\n  model: [tiny\nspace: quick\n")
    with pytest.raises(UserError, match=r"spec\.yaml:3: not YAML"):
        study_spec(Settings(spec=str(path)))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param(b"workload:\n  model: \xff", ":2: expected UTF-8 text, found byte 0xff", id="no UTF-8"),
        pytest.param(b"workload:\n\n  model: \0", ":3: not YAML: expected text, found character U+0000", id="a NUL"),
        pytest.param(b"", ": expected a mapping with workload and space, found nothing", id="an empty file"),
    ],
)
def test_a_spec_file_that_is_no_text_names_the_place(tmp_path, content, complaint):
    path = tmp_path / "spec.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        study_spec(Settings(spec=str(path)))
    assert str(caught.value) == f"{path}{complaint}"


def test_a_flag_that_the_spec_file_says_already_is_refused(tmp_path):
    with pytest.raises(UserError, match="--seq-len: the spec file says this already"):
        study_spec(Settings(spec=spec_file(tmp_path), seq_len=9))


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        pytest.param(None, (), id="all"),
        pytest.param("0", (0,), id="one"),
        pytest.param("1,3", (1, 3), id="some"),
    ],
)
def test_gpus(text, indices):
    assert parse_gpus(text) == indices


@pytest.mark.parametrize("text", ["", "0,", "all", "-1", "0,0", "0 1"])
def test_wrong_gpus(text):
    with pytest.raises(UserError, match="--gpus: expected different indices"):
        parse_gpus(text)


def test_the_spec_of_a_trainer_s_study_is_read_again_with_the_precision_that_was_settled(tmp_path):
    workload = {"script": "train.py:make", "trainer": "hf", "precision": "bf16-mixed"}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"workload": workload, "space": "quick"}))
    assert study_spec(Settings(spec=str(tmp_path / "spec.yaml"))).workload.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        pytest.param({"method": "full"}, ("ddp", "zero2", "fsdp", "zero3", "none"), id="full"),
        pytest.param({"method": "qlora"}, ("ddp", "zero2", "none"), id="4-bit weights stay whole"),
        pytest.param({"precision": "fp16-mixed"}, ("ddp", "none"), id="a scaler of gradients"),
    ],
)
def test_parallel_auto_lets_the_legal_ways_to_train_vary(flags, ways):
    found = asked(parallel="auto", gpus_per_trial=2, global_batch=8, **flags)
    (parameter,) = found.space.parameters["parallel"]
    assert (parameter.choices, parameter.default) == (ways, "ddp")


def test_a_space_that_varies_the_way_to_train_needs_parallel_auto(tmp_path):
    data = asked(parallel="auto", gpus_per_trial=2, global_batch=8, search_space="quick").space.model_dump(mode="json")
    (tmp_path / "ways.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(UserError, match="varies parallel: give --parallel auto"):
        asked(search_space=str(tmp_path / "ways.yaml"))


def test_what_the_user_runs_today_is_a_file_or_words(tmp_path):
    words = asked(against="scope=model,micro_batch=2").against
    assert words == {**defaults(), "scope": "model", "micro_batch": 2}
    data = yaml.safe_load((ROOT / "studies" / "h200-llama2-7b-lora-b4" / "best.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    assert asked(against=str(tmp_path / "mine.yaml")).against == {**defaults(), **data["config"]}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("scope=layers", "--against scope: expected one of none, model", id="no such scope"),
        pytest.param("scope=none,mode=max-autotune", "--against mode=max-autotune: means nothing", id="idle"),
        pytest.param("padding=packed", "--against padding=packed: all sequences have one length", id="no lengths"),
        pytest.param("parallel=ddp", "--against parallel=ddp: expected none", id="a way without its GPUs"),
        pytest.param("", "best-config", id="nothing"),
        pytest.param("lora.r=8", "--against: expected knobs of a config alone, found lora", id="of the workload"),
        pytest.param("mine.yaml", "mine.yaml", id="no such file"),
    ],
)
def test_what_nobody_can_run_today_is_refused(text, complaint):
    with pytest.raises(UserError) as caught:
        asked(against=text)
    assert complaint in str(caught.value)


def test_a_study_without_it_is_the_study_it_was():
    assert "against" not in asked().identity()
    assert asked(against="scope=layer").hash() != asked().hash()


def test_what_the_user_runs_today_trains_the_study_s_batch_in_its_way():
    ranks = {"parallel": "ddp", "gpus_per_trial": 2}
    found = asked(**ranks, global_batch=8, against="scope=model,micro_batch=2,ddp.bucket_cap_mb=50").against
    assert (found["parallel"], found["ddp.bucket_cap_mb"]) == ("ddp", 50)
    with pytest.raises(UserError, match="--against micro_batch=8 on each of 2 GPUs does not divide"):
        asked(**ranks, global_batch=8, against="micro_batch=8")
