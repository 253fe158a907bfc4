"""Reports from records: words, the verdict's sentence, the JSON document, Markdown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autocompile.records import (
    Compile,
    Deviation,
    Failed,
    Failure,
    FailureKind,
    GraphBreak,
    Measured,
    Measurement,
    Numerics,
    PlannedRun,
    Result,
    Stage,
    State,
    StepSeconds,
    Stopped,
    Telemetry,
    TrialRecord,
    Verdict,
)
from autocompile.report import Study
from autocompile.report.document import Places, document, scrub
from autocompile.report.explain import explain
from autocompile.report.markdown import markdown
from autocompile.report.sentence import interval, sentence
from autocompile.report.study import best_rows
from autocompile.report.terminal import failures
from autocompile.report.words import duration, outcome, rate, short, tokens
from autocompile.space import SearchSpace, defaults
from autocompile.spec import Device, Facts, Fidelity, Method, Paired, Parallel, Precision, Role, StudySpec, WorkloadSpec

GIB = 1024**3
EAGER = defaults()
LAYER = {**EAGER, "scope": "layer"}
GRAPHS = {**LAYER, "mode": "reduce-overhead"}


def trial(number, config, *, rate_=1000.0, role=Role.SEARCH, **changes):
    """A complete full-depth slice with one optimizer step of 2048 tokens."""
    step = 2048 / rate_
    found = Measurement(
        tokens_per_second=rate_,
        step_seconds=StepSeconds(median=step, low=step * 0.99, high=step * 1.01, n=20),
        compile=Compile(seconds=13, cold_seconds=13, cache="cold")
        if config["scope"] != "none"
        else Compile(seconds=0, cold_seconds=0, cache="none"),
        peak_memory_bytes=round((25.3 if config["scope"] != "none" else 30.6) * GIB),
        losses=(1.0,),
    )
    plain = {
        "state": State.COMPLETE,
        "value": rate_,
        "value_source": "measured",
        "outcome": Measured(measurement=found),
    }
    return TrialRecord(number=number, role=role, config=dict(config), **{**plain, **changes})


def failed(number, config, kind=FailureKind.OOM, **changes):
    failure = Failure(kind=kind, stage=Stage.WARMUP, message="tried to take 2 GiB\nof 1 GiB", **changes)
    outcome_ = Failed(failure=failure, telemetry=Telemetry(graph_breaks=(GraphBreak(where="a.py:3", reason="print"),)))
    return TrialRecord(number=number, role=Role.SEARCH, state=State.PRUNED, config=dict(config), outcome=outcome_)


SPEC = StudySpec(
    workload=WorkloadSpec(model="llama2-7b", sequence_length=512),
    space=SearchSpace(format=1, parameters={}),
)
FACTS = Facts(
    devices=(Device(uuid="GPU-1", name="NVIDIA H200", memory_bytes=round(139.8 * GIB), capability="9.0"),),
    layers=32,
    parameters=6_738_415_616,
    environment={"torch": "2.11.0", "gpu": "NVIDIA H200"},
    method=Method.LORA,
    precision=Precision.BF16,
)
RECORDS = (
    trial(0, EAGER, rate_=8373.0, role=Role.BASELINE),
    trial(1, LAYER, rate_=13922.0),
    trial(2, LAYER, rate_=13922.0, role=Role.CONFIRM),
    trial(3, EAGER, rate_=8373.0, role=Role.CONFIRM),
)
WIN = Verdict(
    result=Result.WIN,
    confirmed=True,
    config=LAYER,
    tokens_per_second=13922.0,
    speedup=1.66,
    speedup_vs_best_eager=1.66,
    speedup_low=1.61,
    speedup_high=1.71,
    break_even_steps=134,
    confirmed_by=(2, 3),
    rounds=5,
    by_length=(
        PlannedRun(steps=500, amount=1_024_000, config=EAGER, seconds=122, eager_seconds=122),
        PlannedRun(steps=50_000, amount=102_400_000, config=LAYER, seconds=7368, eager_seconds=None),
    ),
)


def study(verdict=WIN, records=RECORDS, **changes):
    plain = {"spec": SPEC, "facts": FACTS, "derived": (), "used_seconds": 400.0, "total_seconds": 540.0}
    return Study(name="llama2-7b-lora", records=records, verdict=verdict, **{**plain, **changes})


def planned(count, steps=None):
    return SPEC.model_copy(update={"planned_tokens": count, "planned_steps": steps})


PROVISIONAL = "; provisional: the budget did not hold the confirming runs"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        pytest.param(
            study(),
            "1.66x faster than eager; 13 s of compile paid back after 134 steps; peak 25.3 of 139.8 GiB",
            id="a win",
        ),
        pytest.param(
            study(spec=planned(50_000_000)),
            "1.66x faster than eager; 13 s of compile paid back after 134 steps; peak 25.3 of 139.8 GiB; "
            "your 50M tokens: 1 h 0 min instead of 1 h 39 min",
            id="a win for a planned run, whose ratio is of the whole run",
        ),
        pytest.param(
            study(spec=planned(None, steps=1000)),
            "1.66x faster than eager; 13 s of compile paid back after 134 steps; peak 25.3 of 139.8 GiB; "
            "your 2M tokens: 2 min 40 s instead of 4 min 25 s",
            id="a win for a run planned in steps of 2048 tokens",
        ),
        pytest.param(
            study(WIN.model_copy(update={"confirmed": False, "confirmed_by": ()})),
            "1.66x faster than eager; 13 s of compile paid back after 134 steps; peak 25.3 of 139.8 GiB" + PROVISIONAL,
            id="a win that nothing confirmed",
        ),
        pytest.param(
            study(WIN.model_copy(update={"speedup_vs_best_eager": 1.38, "break_even_steps": None})),
            "1.38x faster than the best eager config (1.66x with the same settings); 13 s of compile; "
            "peak 25.3 of 139.8 GiB",
            id="a win over a better eager config",
        ),
        pytest.param(
            study(WIN.model_copy(update={"speedup_vs_best_eager": 1.38, "speedup": None})),
            "1.38x faster than eager; 13 s of compile paid back after 134 steps; peak 25.3 of 139.8 GiB",
            id="a win whose own settings eager could not run",
        ),
        pytest.param(
            study(
                WIN.model_copy(
                    update={
                        "speedup_vs_best_eager": 1.38,
                        "speedup": None,
                        "unmeasured": ({**EAGER, "micro_batch": 8},),
                    }
                )
            ),
            "1.38x faster than the best eager config that was measured; 13 s of compile paid back after 134 steps; "
            "peak 25.3 of 139.8 GiB; not measured: eager micro_batch=8",
            id="a win whose own settings eager had no time to run",
        ),
        pytest.param(
            study(
                WIN.model_copy(
                    update={"result": Result.TIE, "config": EAGER, "speedup_vs_best_eager": 1.004, "speedup": 1.004}
                )
            ),
            "no difference beyond the noise: the best compiled config has 1.00x eager's speed, leave it off; "
            "eager has 8373 tokens/s; peak 30.6 of 139.8 GiB",
            id="a tie",
        ),
        pytest.param(
            study(Verdict(result=Result.TIE, confirmed=False, config=EAGER), RECORDS[:1]),
            "no compiled config could be compared with eager, so nothing is known of compile here; "
            "eager has 8373 tokens/s; peak 30.6 of 139.8 GiB" + PROVISIONAL,
            id="only eager was measured",
        ),
        pytest.param(
            study(Verdict(result=Result.TIE, confirmed=False, config=EAGER), (*RECORDS[:1], failed(4, LAYER))),
            "no compiled config ran through, so nothing is known of compile here; eager has 8373 tokens/s; "
            "peak 30.6 of 139.8 GiB",
            id="all that was compiled failed",
        ),
        pytest.param(
            study(
                WIN.model_copy(
                    update={
                        "result": Result.TIE,
                        "config": EAGER,
                        "speedup_vs_best_eager": 2.88,
                        "speedup_low": 0.01,
                        "speedup_high": 900.0,
                    }
                )
            ),
            "undecided: the best compiled config had 2.88x eager's speed, but runs differed too much to tell; measure "
            "again, longer or on a quieter machine; eager has 8373 tokens/s; peak 30.6 of 139.8 GiB",
            id="an interval that says nothing",
        ),
        pytest.param(
            study(
                WIN.model_copy(update={"result": Result.LOSS, "config": EAGER, "speedup_vs_best_eager": 0.77}),
                spec=planned(1_000_000),
            ),
            "compile is slower here: 0.77x eager's speed, so leave it off; eager has 8373 tokens/s; "
            "peak 30.6 of 139.8 GiB; your 1M tokens: 1 min 59 s",
            id="a loss",
        ),
        pytest.param(
            study(Verdict(result=Result.NONE, confirmed=False), ()),
            "nothing was measured, so there is no verdict",
            id="nothing at all",
        ),
    ],
)
def test_the_verdict_in_one_sentence(found, text):
    assert sentence(found) == text


@pytest.mark.parametrize(
    ("found", "basis"),
    [
        pytest.param(WIN, "95 % interval from 5 paired runs in fresh processes", id="confirmed"),
        pytest.param(
            WIN.model_copy(update={"confirmed": False, "rounds": 0}),
            "from single runs: their own spread, and 10 % between processes",
            id="provisional",
        ),
    ],
)
def test_the_interval_is_named_as_what_it_is(found, basis):
    assert interval(study(found)) == f"between 1.610x and 1.710x of the best eager config ({basis})"


def test_there_is_no_interval_where_nothing_was_compared():
    assert interval(study(Verdict(result=Result.NONE, confirmed=False))) is None


def test_a_comparison_of_compiled_configs_speaks_of_the_first_and_not_of_eager():
    spec = SPEC.model_copy(update={"plan": Paired(configs=(LAYER, GRAPHS))})
    result = study(WIN.model_copy(update={"result": Result.TIE, "config": LAYER}), spec=spec)
    assert sentence(result).startswith("1.660x the speed of layer: no difference beyond the noise")
    assert "1.710x of layer (95 %" in str(interval(result))
    alone = result.verdict.model_copy(update={"speedup_vs_best_eager": None, "confirmed": False})
    assert sentence(study(alone, spec=spec)).startswith("nothing could be compared with layer; provisional")
    assert "that the others were compared with" in result.report() and "compile off" not in result.report()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        pytest.param(0.42, "0.4 s", id="below ten seconds with a decimal"),
        pytest.param(13.9, "13 s", id="seconds"),
        pytest.param(250, "4 min 10 s", id="minutes"),
        pytest.param(5972, "1 h 39 min", id="hours"),
        pytest.param(183_600, "2 d 3 h", id="days"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("function", "amount", "text"),
    [
        pytest.param(tokens, 50_000_000, "50M", id="round millions"),
        pytest.param(tokens, 1_500_000_000, "1.5B", id="one decimal"),
        pytest.param(tokens, 999, "999", id="few tokens"),
        pytest.param(rate, 13922.0, "13.9k", id="thousands a second"),
        pytest.param(rate, 972.4, "972", id="hundreds a second"),
        pytest.param(rate, 3.14159, "3.14", id="a slow model"),
    ],
)
def test_amounts(function, amount, text):
    assert function(amount) == text


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param(EAGER, "eager", id="all defaults"),
        pytest.param({**EAGER, "micro_batch": 8}, "eager micro_batch=8", id="eager with another batch"),
        pytest.param(
            {**LAYER, "mode": "reduce-overhead", "gradient_checkpointing": True},
            "layer mode=reduce-overhead gradient_checkpointing=true",
            id="departures from the defaults only",
        ),
    ],
)
def test_short(config, text):
    assert short(config) == text


@pytest.mark.parametrize(
    ("record", "text"),
    [
        pytest.param(RECORDS[1], "13.9k tokens/s, 147.1 ms a step, peak 25.3 GiB", id="measured"),
        pytest.param(failed(4, LAYER), "oom in warmup: tried to take 2 GiB of 1 GiB", id="a failure is one line"),
        pytest.param(
            failed(4, LAYER, FailureKind.GRAPH_BREAK, where="train.py:7"),
            "graph_break in warmup: tried to take 2 GiB of 1 GiB (train.py:7)",
            id="a failure with a place",
        ),
        pytest.param(
            TrialRecord(
                number=1,
                role=Role.SEARCH,
                state=State.FAIL,
                config=LAYER,
                stopped=Stopped(reason="budget", bound=90),
            ),
            "stopped by the budget after 1 min 30 s",
            id="ended by the budget",
        ),
        pytest.param(
            TrialRecord(number=1, role=Role.SEARCH, state=State.RUNNING, config=LAYER), "running", id="still running"
        ),
    ],
)
def test_outcome(record, text):
    assert outcome(record) == text


@pytest.mark.parametrize(("checked", "told"), [(True, False), (False, True)])
def test_a_config_whose_numerics_could_not_be_checked_is_told(checked, told):
    telemetry = Telemetry(numerics=Numerics(checked=checked, note="no reference"))
    record = RECORDS[1].model_copy(update={"outcome": RECORDS[1].outcome.model_copy(update={"telemetry": telemetry})})
    assert outcome(record).endswith("numerics not checked") is told


def test_best_rows_take_confirmations_before_searches_and_keep_the_best_eager():
    faster = [trial(10 + power, {**LAYER, "micro_batch": 8 << power}, rate_=20_000 + power) for power in range(4)]
    rows = best_rows([*RECORDS, *faster, failed(30, LAYER)], limit=3)
    assert [(row.config["scope"], row.config["micro_batch"]) for row in rows] == [
        ("layer", 64),
        ("layer", 32),
        ("none", 4),
    ]
    assert best_rows(RECORDS, limit=3)[0].trials == (2,)
    assert best_rows(RECORDS, limit=3)[0].state == "measured once"  # one confirmation has no spread
    again = best_rows([*RECORDS, trial(40, LAYER, rate_=90_000.0, role=Role.CONFIRM)], limit=3)[0]
    assert (again.trials, again.state) == ((2, 40), "confirmed")


def test_shallow_slices_are_no_rows():
    assert best_rows([trial(0, EAGER, fidelity=Fidelity(layers=2))], limit=3) == []


PLACES = Places(
    folders=("/data/ann/project", "/data/ann/project/train", "/opt/app"),
    names=("gpunode17", "ann"),
)


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        pytest.param(
            "/data/ann/project/.venv/lib/python3.12/site-packages/torch/nn/x.py:3",
            "torch/nn/x.py:3",
            id="relative to site-packages",
        ),
        pytest.param("/usr/lib/python3/dist-packages/yaml/a.py", "yaml/a.py", id="relative to dist-packages"),
        pytest.param("/data/ann/project/train/job.py:12", "job.py:12", id="relative to the workload's folder"),
        pytest.param("in /data/ann/project/other.py, line 3", "in other.py, line 3", id="relative to the folder here"),
        pytest.param("ran in /data/ann/project", "ran in .", id="the folder itself"),
        pytest.param("/data/ann/projects/x.py", "/data/.../projects/x.py", id="a longer name is another folder"),
        pytest.param("/home/bob/models/llama", "~/models/llama", id="anybody's home"),
        pytest.param("/root/.cache/x", "~/.cache/x", id="root's home"),
        pytest.param("/data/root/x", "/data/root/x", id="a folder called root is no home"),
        pytest.param("/opt/pyenv/lib/python3.11/ast.py", "python3.11/ast.py", id="the standard library"),
        pytest.param("/tmp/torchinductor_bob/ab/c.py", "/tmp/torchinductor/ab/c.py", id="inductor's folder"),
        pytest.param("cannot reach gpunode17:5432", "cannot reach ...:5432", id="the host's name"),
        pytest.param("gpunode17.cluster.example is down", "... is down", id="the host's name with its domain"),
        pytest.param("user ann annotated", "user ... annotated", id="the user's name as a word only"),
        pytest.param("*.self_attn.q_proj", "*.self_attn.q_proj", id="a pattern stays"),
        pytest.param("expected 3/4 of it", "expected 3/4 of it", id="a fraction stays"),
        pytest.param("org/name", "org/name", id="a Hub id stays"),
        pytest.param("ann", "ann", id="a bare word is a value, though a user has its name"),
        pytest.param("gpunode17", "gpunode17", id="a bare word is no sentence"),
    ],
)
def test_scrub(text, scrubbed):
    assert scrub(text, PLACES) == scrubbed


def test_the_document_has_the_fields_that_scripts_read():
    records = (*RECORDS, failed(4, LAYER), TrialRecord(number=5, role=Role.SEARCH, state=State.RUNNING, config=LAYER))
    found = document(study(records=records), Places())
    assert list(found) == ["study", "spec", "facts", "budget", "trials", "derived", "verdict"]
    assert found["budget"] == {"total_seconds": 540.0, "used_seconds": 400.0}
    common = {"number", "role", "state", "config", "fidelity", "stopped", "value", "value_source", "telemetry"}
    assert set(found["trials"][0]) == {*common, "measurement"}
    assert set(found["trials"][4]) == {*common, "failure"}
    assert set(found["trials"][5]) == common
    assert found["trials"][4]["failure"]["kind"] == "oom"
    assert found["trials"][4]["telemetry"]["graph_breaks"] == [{"where": "a.py:3", "reason": "print"}]
    assert found["trials"][0]["measurement"]["compile"] == {"seconds": 0, "cold_seconds": 0, "cache": "none"}
    assert found["verdict"]["result"] == "win"
    assert found["verdict"]["confirmed_by"] == [2, 3]
    json.dumps(found)


def test_the_document_is_scrubbed_to_the_last_string():
    spec = SPEC.model_copy(update={"cache_root": "/data/ann/project/cache"})
    message = failed(4, LAYER, where="/data/ann/project/train/job.py:3")
    text = json.dumps(document(study(spec=spec, records=(message,)), PLACES))
    assert "/data" not in text
    assert '"job.py:3"' in text


def test_markdown_says_what_failed_and_what_the_compiler_did():
    text = markdown(study(records=(*RECORDS, failed(4, LAYER))), Places())
    assert "# llama2-7b-lora\n\n**1.66x faster than eager; 13 s of compile" in text
    assert "95 % interval from 5 paired runs in fresh processes" in text
    assert "| 4 | search | pruned | `layer` | oom in warmup: tried to take 2 GiB of 1 GiB |" in text
    assert "- trial 4: graph break at a.py:3: print" in text
    assert 'autocompile.apply(model, "best.yaml")' in text
    assert "| torch | 2.11.0 |" in text


def test_markdown_has_a_table_of_the_best_config_by_length_of_the_run():
    text = markdown(study(), Places())
    assert "## By length of the run" in text
    assert "| 500 | 1M | `eager` | 2 min 2 s | 2 min 2 s |" in text
    assert "| 50,000 | 102.4M | `layer` | 2 h 2 min | - |" in text
    assert "## By length of the run" not in markdown(study(WIN.model_copy(update={"by_length": ()})), Places())


def test_markdown_compares_ways_to_pad_sequences_of_many_lengths():
    fixed, bucket = ({**LAYER, "padding": policy} for policy in ("fixed", "bucket:64"))
    records = (*RECORDS, trial(8, fixed, rate_=900), trial(9, bucket, rate_=19000), trial(10, bucket, rate_=18000))
    varying = SPEC.model_copy(update={"workload": SPEC.workload.model_copy(update={"lengths": "uniform:16-512"})})
    text = markdown(replace(study(records=records), spec=varying), Places())
    table = text.split("## By padding")[1].split("##")[0].strip().splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table] == ["bucket:64", "longest", "fixed"]
    assert "| 19.0k |" in table[0]
    assert "## By padding" not in markdown(study(records=records), Places())


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        pytest.param(1.23, "; 1.23x the speed of what you run today (layer mode=reduce-overhead)", id="beaten"),
        pytest.param(1.0, "; it is what you run today (layer mode=reduce-overhead)", id="the same"),
    ],
)
def test_what_the_user_runs_today_is_named(ratio, text):
    today = SPEC.model_copy(update={"against": GRAPHS})
    assert text in sentence(study(WIN.model_copy(update={"speedup_over_against": ratio}), spec=today))


@pytest.mark.parametrize(("confirmed", "low", "said"), [(True, 0.8, True), (False, 0.8, False), (False, 0.5, True)])
def test_a_tie_whose_interval_says_nothing_is_undecided(confirmed, low, said):
    tie = {"result": Result.TIE, "config": EAGER, "speedup_vs_best_eager": 1.0, "confirmed": confirmed}
    found = study(WIN.model_copy(update={**tie, "speedup_low": low, "speedup_high": 1.1}))
    assert sentence(found).startswith("undecided") is said
    assert ("Leave compile off." in markdown(found, Places())) is not said


def test_ways_to_train_stand_side_by_side_where_they_are_compared():
    asked = SPEC.workload.model_copy(update={"parallel": Parallel.AUTO, "gpus_per_trial": 2, "global_batch": 8})
    ddp, zero, alone = (
        {name: {**config, "parallel": way} for name, config in (("eager", EAGER), ("layer", LAYER))}
        for way in ("ddp", "zero2", "none")
    )
    records = (
        trial(0, ddp["eager"], rate_=15000.0, role=Role.BASELINE),
        trial(1, ddp["layer"], rate_=25000.0),
        trial(2, zero["eager"], rate_=14000.0),
        trial(3, alone["layer"], rate_=13000.0),
        failed(4, {**LAYER, "parallel": "zero3"}),
    )
    found = study(
        WIN.model_copy(update={"config": ddp["layer"]}), records, spec=SPEC.model_copy(update={"workload": asked})
    )
    text = markdown(found, Places())
    table = [line.strip("| ").split(" | ") for line in text.split("## By way to train")[1].split("##")[0].splitlines()]
    assert table[4:-1] == [
        ["ddp", "2", "`layer parallel=ddp`", "25.0k", "1.92x", "25.3", "15.0k"],
        ["zero2", "2", "`eager parallel=zero2`", "14.0k", "1.08x", "30.6", "14.0k"],
        ["none", "1", "`layer`", "13.0k", "1.00x", "25.3", "-"],
        ["zero3", "2", "oom in warmup: tried to take 2 GiB of 1 GiB", "-", "-", "-", "-"],
    ]
    assert "; of one GPU's speed ddp 1.92x, zero2 1.08x" in sentence(found)
    assert "By way to train" not in markdown(study(), Places())


def test_markdown_of_a_loss_does_not_advertise_compile():
    loss = WIN.model_copy(update={"result": Result.LOSS, "config": EAGER, "speedup_vs_best_eager": 0.77})
    assert "Leave compile off." in markdown(study(loss), Places())


def test_failures_of_one_kind_are_one_line():
    records = (failed(4, LAYER), failed(5, {**LAYER, "micro_batch": 64}), RECORDS[0])
    assert failures(study(records=records)) == ["2 x layer: oom in warmup: tried to take 2 GiB of 1 GiB"]


@pytest.mark.parametrize(
    ("first_eager_rate", "said"),
    [
        pytest.param(8373.0 * 1.10, False, id="runs within what is usual"),
        pytest.param(8373.0 * 1.36, True, id="eager took 36 % longer when it was confirmed"),
    ],
)
def test_runs_of_one_config_that_lie_far_apart_are_spoken_of(first_eager_rate, said):
    records = (trial(0, EAGER, rate_=first_eager_rate, role=Role.BASELINE), *RECORDS[1:])
    assert ("varied by 36%" in sentence(study(records=records))) is said


def test_a_wide_interval_within_one_run_is_spoken_of():
    wide = RECORDS[3].outcome.measurement.model_copy(
        update={"step_seconds": StepSeconds(median=1, low=0.5, high=3, n=5)}
    )
    noisy = RECORDS[3].model_copy(update={"outcome": Measured(measurement=wide)})
    assert "varied by" in sentence(study(records=(*RECORDS[1:3], noisy)))


def test_explain_says_of_a_confirmation_where_its_numerics_were_compared():
    off = Deviation(quantity="loss", error=0.002, eager_error=0.001, limit=0.004)
    telemetry = Telemetry(graphs=2, numerics=Numerics(checked=True, steps=3, worst=(off,)))
    searched = RECORDS[1].model_copy(update={"outcome": RECORDS[1].outcome.model_copy(update={"telemetry": telemetry})})
    text = explain(study(records=(RECORDS[0], searched, *RECORDS[2:])), Places(), 2)
    assert "numerics     in trial 1: over 3 steps loss off by 0.002 (eager by 0.001, limit 0.004)" in text
