"""The commands as a user types them, with a fake child in place of the interpreter that runs slices."""

from __future__ import annotations

import io
import json
import os
import sqlite3

import pytest
import yaml

from autocompile.api import check_mask, slots
from autocompile.cli import main
from autocompile.cli.output import console
from autocompile.errors import UserError
from autocompile.spec import Device, Facts
from tests.contract.fake_child import make_python

STUDY = "first"
SCRIPT = ("--workload", "job.py:build")  # its options tell the fake child what to do


@pytest.fixture
def run(monkeypatch, capsys):
    """Type a command: its exit code, standard output and standard error."""

    def typed(*words):
        monkeypatch.setattr("sys.argv", ["autocompile", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return typed


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tune(run, here, tmp_path_factory):
    python = make_python(tmp_path_factory.mktemp("python"))

    def typed(*words, source=("--model", "tiny-llama")):
        return run("tune", *source, "--search-space", "quick", "--budget", "60s", "--python", python, *words)

    return typed


def test_a_study_from_its_first_line_to_its_files(tune, run, here):
    code, out, err = tune("--study", STUDY, "--trials", 3, "--json")
    assert code == 0, err
    lines = err.splitlines()
    assert lines[0] == "checking the machine and the workload ..."
    assert "tiny-llama: 1.1B parameters in 32 layers" in lines[1]
    assert any(line.startswith("trial 0 baseline eager: started") for line in lines)
    assert 'autocompile.apply(model, "studies/first/best.yaml")' in err

    document = json.loads(out)
    assert document["study"] == STUDY
    assert document["verdict"]["result"] == "win"
    assert str(here) not in out

    folder = here / "studies" / STUDY
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert best["config"] == document["verdict"]["config"]
    report = (folder / "report.md").read_text()
    assert "faster than" in report

    assert json.loads(run("show", STUDY, "--json")[1])["trials"] == document["trials"]
    code, out, _ = run("show", STUDY)
    assert code == 0
    assert "faster than" in out
    assert run("report", STUDY)[1] == report
    code, out, _ = run("studies")
    assert code == 0
    assert "first" in out
    assert "win" in out

    n_trials = len(document["trials"])
    again = json.loads(tune("--study", STUDY, "--trials", 3, "--json")[1])
    assert len(again["trials"]) == n_trials, "a finished study measures nothing more"

    code, _, err = tune("--study", STUDY, "--seq-len", 64)
    assert code == 2
    assert "exists with another spec: workload.sequence_length was 1024, is now 64" in err

    assert run("rm", STUDY, "--yes")[0] == 0
    assert not folder.exists()
    assert run("show", STUDY)[0] == 2


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        pytest.param(["tune", "--model", "llama2-7bb"], 2, "did you mean llama2-7b", id="an unknown model"),
        pytest.param(["tune", "--model", "tiny-llama", "--budget", "soon"], 2, "budget: expected a time", id="no time"),
        pytest.param(["tune"], 2, "expected exactly one of", id="nothing to train"),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--executor", "ray"], 2, "expected local", id="no such executor"
        ),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--parallel", "tensor"], 2, "tensor, pipeline and", id="not a way"
        ),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--parallel", "ddp"],
            2,
            "autocompile: parallel ddp trains on several GPUs: give --gpus-per-trial 2",
            id="one process on several",
        ),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--gpus-per-trial", "2"], 2, "give --parallel ddp", id="no way to use two"
        ),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--method", "qlora", "--parallel", "zero3", "--gpus-per-trial", "2"],
            2,
            "parallel zero3: bitsandbytes' 4-bit weights cannot be sharded",
            id="an illegal pair",
        ),
        pytest.param(["tune", "--model", "tiny-llama", "--gpus", "x"], 2, "--gpus: expected", id="no GPU list"),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--study", "../up"], 2, "--study: expected letters", id="a path as a name"
        ),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--storage", "nowhere"], 2, "storage: expected", id="no storage"
        ),
        pytest.param(
            ["tune", "--model", "tiny-llama", "--python", "/no/python"], 3, "cannot start", id="no interpreter"
        ),
        pytest.param(["show", "x"], 2, "there are no studies yet", id="no database to read"),
        pytest.param(["fly"], 2, "No such command", id="an unknown command"),
        pytest.param(["tune", "--trials", "many"], 2, "--trials", id="a number that is none"),
    ],
)
def test_wrong_input_writes_nothing(run, here, words, code, complaint):
    found, out, err = run(*words)
    assert (found, out) == (code, "")
    assert complaint in err
    assert "Traceback" not in err
    assert os.listdir(here) == []


def test_a_search_space_with_a_mistake_is_named_with_its_line(run, here):
    (here / "mine.yaml").write_text("format: 1\nparameters:\n  scop:\n    choices: [none]\n")
    code, _, err = run("tune", "--model", "tiny-llama", "--search-space", "mine.yaml")
    assert code == 2
    assert "mine.yaml:3: parameters.scop: unknown knob" in err
    assert os.listdir(here) == ["mine.yaml"]


def test_a_workload_to_blame_is_the_users_error(tune, here):
    code, _, err = tune("--set", "workload.fake_preflight=workload_error", source=SCRIPT)
    assert code == 2
    assert "Traceback" not in err
    assert os.listdir(here) == []


def test_a_machine_to_blame_is_the_machines_error(tune, here):
    code, _, _ = tune("--set", "workload.fake_preflight=infrastructure", source=SCRIPT)
    assert code == 3
    assert os.listdir(here) == []


def test_a_study_without_any_measurement_ends_with_one(tune):
    code, _, err = tune("--set", "workload.fake_oom_above=0", source=SCRIPT)
    assert code == 1
    assert "nothing was measured" in err


def test_rm_asks_first(tune, run, here, monkeypatch):
    tune("--study", STUDY, "--trials", 1)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run("rm", STUDY)[0] != 0
    assert (here / "studies" / STUDY).is_dir()


def test_models_lists_the_catalogue(run):
    code, out, _ = run("models")
    assert code == 0
    assert "llama2-7b" in out
    assert "tiny-llama" in out


def test_doctor_names_what_it_found_and_leaves_nothing(run, here, tmp_path_factory):
    code, out, err = run("doctor", "--python", make_python(tmp_path_factory.mktemp("python")))
    assert code == 0, err
    for what in ("torch", "triton", "GPU", "C++ compiler", "cache folder", "database", "works on Fake CPU"):
        assert what in out
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    ("variables", "cure"),
    [
        pytest.param({"CXX": "/nonexistent"}, "CXX=/nonexistent is no program that runs: unset CXX", id="CXX is wrong"),
        pytest.param({"PATH": ""}, "no C++ compiler found: install g++", id="no compiler at all"),
    ],
)
def test_doctor_says_what_to_do_without_a_compiler(run, here, monkeypatch, variables, cure):
    monkeypatch.delenv("CXX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = run("doctor")
    assert (code, err.count("\n")) == (3, 1), "one line, before anything is compiled"
    assert cure in err
    assert "missing" in out


def test_doctor_says_what_to_do_about_the_cache_folder(run, here):
    (here / "studies").touch()
    code, _, err = run("doctor")
    assert code == 3
    assert f"cache folder {here}/studies: it is a file: move it away" in err
    (here / "a blank").mkdir()
    os.chdir(here / "a blank")
    assert "torch cannot compile for a CPU where the path holds a blank" in run("doctor")[2]


def test_doctor_asks_the_database(run, here):
    (here / "no.db").write_text("no database")
    code, _, err = run("doctor", "--storage", "sqlite:///no.db")
    assert code == 3
    assert "file is not a database: move no.db away" in err
    code, _, err = run("doctor", "--storage", "postgresql+psycopg://me:secret@127.0.0.1:1/x")
    assert code == 3
    assert "Connection refused: start the server, or mend host, port, user and database" in err
    assert "secret" not in err
    assert run("doctor", "--storage", "nowhere")[0] == 2


def test_doctor_does_not_wait_long_for_a_locked_database(run, here):
    holder = sqlite3.connect(here / "studies.db", isolation_level=None)
    holder.execute("CREATE TABLE x (y)")
    holder.execute("BEGIN IMMEDIATE")
    try:
        code, _, err = run("doctor", "--storage", "sqlite:///studies.db")
    finally:
        holder.close()
    assert code == 3
    assert "database is locked: another program holds it" in err


def test_the_version(run):
    from autocompile import __version__

    assert run("--version")[:2] == (0, f"autocompile {__version__}\n")


@pytest.mark.parametrize(
    ("gpus", "mask", "complaint"),
    [
        pytest.param((5,), None, None, id="no mask"),
        pytest.param((), "2,3", None, id="all that are visible"),
        pytest.param((0, 1), "2,3", None, id="both that are visible"),
        pytest.param((0, 5), "2,3", 'CUDA_VISIBLE_DEVICES="2,3" leaves 2 visible, found index 5', id="a masked one"),
        pytest.param((2,), "GPU-a,GPU-b", "leaves 2 visible, found index 2", id="masked by UUID"),
        pytest.param((0,), "", "leaves 0 visible", id="an empty mask"),
    ],
)
def test_gpus_stay_behind_the_mask(gpus, mask, complaint):
    if complaint is None:
        check_mask(gpus, mask)
        return
    with pytest.raises(UserError, match=complaint):
        check_mask(gpus, mask)


def test_a_gpu_behind_the_mask_is_refused_before_anything_runs(run, here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    code, _, err = run("tune", "--model", "tiny-llama", "--gpus", 5, "--python", "/no/python")
    assert code == 2
    assert "found index 5" in err
    assert os.listdir(here) == []


def test_gpus_of_two_kinds_are_refused_before_anything_is_written(tune, here, tmp_path_factory):
    python = tmp_path_factory.mktemp("mixed") / "python"
    answer = {**json.loads(facts("H200", "A100").model_dump_json()), "type": "facts"}
    (python.parent / "facts.json").write_text(json.dumps(answer))
    python.write_text(f'#!/bin/sh\ncp {python.parent}/facts.json "$3/outcome.json"\n')
    python.chmod(0o755)
    code, _, err = tune("--python", python)
    assert code == 2
    assert "0: H200, 1: A100" in err
    assert os.listdir(here) == []


def facts(*names):
    kind = "cuda" if names[0] != "cpu" else "cpu"
    devices = tuple(
        Device(type=kind, uuid=f"GPU-{number}", name=name, memory_bytes=80 << 30) for number, name in enumerate(names)
    )
    return Facts(devices=devices, layers=2, parameters=1000, environment={})


@pytest.mark.parametrize(
    ("names", "gpus", "each", "found"),
    [
        pytest.param(["cpu"], (), 1, ((),), id="one slot on a CPU"),
        pytest.param(["cpu"], (), 2, ((),), id="also for ranks"),
        pytest.param(["H200"], (), 1, ((0,),), id="one GPU"),
        pytest.param(["H200", "H200"], (), 1, ((0,), (1,)), id="equal GPUs"),
        pytest.param(["H200"] * 5, (), 2, ((0, 1), (2, 3)), id="pairs of GPUs, one left over"),
        pytest.param(["H200"] * 2, (3, 1), 2, ((3, 1),), id="the pair that was named"),
        pytest.param(["H200"], (), 2, "--gpus-per-trial 2: expected at most the 1", id="too few GPUs"),
        pytest.param(["H200"], (1,), 1, ((1,),), id="the one that was named"),
        pytest.param(["H200", "A100"], (), 1, "0: H200, 1: A100; name those", id="GPUs of two kinds"),
        pytest.param(["H200", "A100"], (2, 3), 1, "2: H200, 3: A100; name those", id="named GPUs of two kinds"),
    ],
)
def test_slots(names, gpus, each, found):
    if not isinstance(found, str):
        assert slots(facts(*names), gpus, each=each) == found
        return
    with pytest.raises(UserError, match=found):
        slots(facts(*names), gpus, each=each)


def test_a_function_that_is_called_like_an_emoji_keeps_its_name(capsys):
    console(stderr=True).print("workloads.py:llama: 4.2M parameters")
    assert "workloads.py:llama: 4.2M" in capsys.readouterr().err
