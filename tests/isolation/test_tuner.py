"""The coordinator with real child processes and a real database: budgets, failures, interruptions, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from autocompile.best_file import BestConfig
from autocompile.errors import MachineError, UserError
from autocompile.executors.local import LocalExecutor
from autocompile.records import State, TrialRecord
from autocompile.spec import Facts, Role, StudySpec
from autocompile.storage import Storage
from autocompile.tuner import Interrupted, open_study, preflight
from tests.contract.fake_child import make_python
from tests.isolation.studies import NAME, run, spec, url

ROOT = Path(__file__).parents[2]
SLOW = {"trials": None, "budget": 120, "fake_seconds": 0.5}


def test_a_study_ends_with_a_verdict_and_its_files(tmp_path: Path) -> None:
    result = run(tmp_path, spec(), name="tiny")
    assert {record.state for record in result.records} == {State.COMPLETE}
    assert result.records == tuple(kept(tmp_path, "tiny"))
    assert result.verdict.config is not None
    assert result.verdict.config["scope"] == "layer"
    best = BestConfig.model_validate(yaml.safe_load((tmp_path / "tiny" / "best.yaml").read_text()))
    assert best == result.best
    assert StudySpec.model_validate(yaml.safe_load((tmp_path / "tiny" / "spec.yaml").read_text())) == spec()
    assert Facts.model_validate_json((tmp_path / "tiny" / "facts.json").read_text()) == result.facts
    assert (tmp_path / "tiny" / "trials" / "0" / "outcome.json").exists()


def test_each_config_has_one_cache_that_starts_as_the_seed(tmp_path: Path) -> None:
    root = tmp_path / "caches"
    (root / "seed").mkdir(parents=True)
    (root / "seed" / "probe").write_text("made by a preflight")
    result = run(tmp_path, spec().model_copy(update={"cache_root": str(root)}))
    folders = [json.loads((trial / "request.json").read_text())["cache_folder"] for trial in trials(tmp_path)]
    configs = [json.dumps(record.config) for record in result.records]
    assert len(set(zip(folders, configs, strict=True))) == len(set(folders)) == len(set(configs)) < len(folders)
    assert all((Path(folder) / "probe").exists() for folder in folders)
    assert not list(root.glob(".copy*"))


def test_a_failure_of_the_config_is_pruned_and_the_study_goes_on(tmp_path: Path) -> None:
    result = run(tmp_path, spec(fake_oom_above=4))
    states = {record.state for record in result.records if int(record.config["micro_batch"]) > 4}
    assert states == {State.PRUNED}
    assert result.verdict.config is not None
    assert result.verdict.config["micro_batch"] == 4


def test_a_failure_of_the_machine_is_repeated_once(tmp_path: Path) -> None:
    faulty = {"fake": "failure", "fake_kind": "gpu_fault", "fake_once": True, "fake_when": "scope=layer,micro_batch=4"}
    result = run(tmp_path, spec(**faulty))
    found = [r.state for r in result.records if r.config["scope"] == "layer" and r.config["micro_batch"] == 4]
    assert found[:2] == [State.FAIL, State.COMPLETE]


def test_a_machine_that_fails_three_times_in_a_row_ends_the_study(tmp_path: Path) -> None:
    broken = spec(fake="failure", fake_kind="infrastructure")
    with pytest.raises(MachineError, match="3 slices in a row"):
        run(tmp_path, broken)
    assert [record.state for record in kept(tmp_path)] == [State.FAIL] * 3
    with pytest.raises(MachineError):
        run(tmp_path, broken)
    assert len(kept(tmp_path)) == 6  # the machine may have been mended since: it is tried again


def test_the_budget_is_kept_by_a_slice_that_hangs(tmp_path: Path) -> None:
    began = time.monotonic()
    result = run(tmp_path, spec(trials=None, budget=12, fake="hang", fake_when="micro_batch=2"))
    assert time.monotonic() - began < 12 + 10
    cut = [record for record in result.records if record.stopped]
    assert cut
    assert {(record.state, record.stopped and record.stopped.reason, record.outcome) for record in cut} == {
        (State.FAIL, "budget", None)
    }
    assert result.verdict.config is not None
    assert result.used_seconds == pytest.approx(12, abs=2)
    assert (tmp_path / NAME / "best.yaml").exists()


def test_a_larger_budget_goes_on_and_keeps_the_count(tmp_path: Path) -> None:
    first = run(tmp_path, spec(trials=2))
    second = run(tmp_path, spec(trials=4))
    assert second.records[: len(first.records)] == first.records
    assert len(searched(second.records)) == 4
    assert second.used_seconds > first.used_seconds > 0


def test_the_stop_event_interrupts(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(2, stop.set).start()
    with pytest.raises(Interrupted, match=NAME):
        run(tmp_path, spec(fake="hang", fake_when="scope=layer"), stop=stop)
    assert [record.stopped.reason for record in kept(tmp_path) if record.stopped] == ["interrupted"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_study(tmp_path: Path, number: signal.Signals) -> None:
    with coordinator(tmp_path, SLOW) as process:
        wait_for_trial(tmp_path, 3)
        process.send_signal(number)
        assert process.wait(15) == 128 + number
    records = kept(tmp_path)
    assert [record.state for record in records[:3]] == [State.COMPLETE] * 3
    assert [r.stopped.reason for r in records[3:] if r.stopped] == ["interrupted"]
    assert State.RUNNING not in {record.state for record in records}
    assert used_seconds(tmp_path) > 1
    assert (tmp_path / NAME / "best.yaml").exists()
    assert (tmp_path / NAME / "report.md").exists()
    assert not slices_of(tmp_path)


def test_a_killed_coordinator_loses_the_slice_in_flight_and_runs_it_again_once(tmp_path: Path) -> None:
    with coordinator(tmp_path, SLOW) as process:
        wait_for_trial(tmp_path, 3)
        process.kill()
        process.wait(15)
    before = kept(tmp_path)
    used = used_seconds(tmp_path)
    assert [record.state for record in before] == [State.COMPLETE] * 3 + [State.RUNNING]
    wait_until(lambda: not slices_of(tmp_path))  # the slice sees its parent's end

    result = run(tmp_path, spec(**{**SLOW, "trials": 5}))
    assert result.records[:3] == tuple(before[:3])
    lost = result.records[3]
    assert (lost.state, lost.stopped and lost.stopped.reason) == (State.FAIL, "lost")
    again = [record for record in searched(result.records) if record.config == lost.config]
    assert [record.state for record in again] == [State.FAIL, State.COMPLETE]
    assert State.RUNNING not in {record.state for record in result.records}
    assert result.used_seconds > used > 1


def test_a_complete_answer_of_a_killed_coordinator_is_told(tmp_path: Path) -> None:
    hang = {"fake": "hang_at_exit", "fake_when": "scope=layer", "fake_once": True}
    with coordinator(tmp_path, {"trials": 3, **hang}) as process:
        wait_until(lambda: slices_of(tmp_path) and (tmp_path / NAME / "trials" / "1" / "outcome.json").exists())
        process.kill()
        process.wait(15)
    assert [record.state for record in kept(tmp_path)] == [State.COMPLETE, State.RUNNING]
    wait_until(lambda: not slices_of(tmp_path))
    result = run(tmp_path, spec(trials=2, **hang))
    assert Counter(str(record.config) for record in searched(result.records)).most_common(1)[0][1] == 1
    assert result.records[1].value == pytest.approx(1500)


def test_a_study_in_use_is_refused(tmp_path: Path) -> None:
    with coordinator(tmp_path, SLOW):
        wait_for_trial(tmp_path, 1)
        with pytest.raises(UserError, match="in use"):
            run(tmp_path, spec(**SLOW))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        pytest.param(
            spec(fake_layers=16), r"workload\.options\.fake_layers was None, is now 16", id="another workload"
        ),
        pytest.param(spec(fake_environment="2.14.0"), "workload.options", id="another option"),
        pytest.param(spec().model_copy(update={"seed": 1}), "seed was 0, is now 1", id="another seed"),
        pytest.param(
            spec().model_copy(update={"pinned": {"micro_batch": 4}}),
            r"pinned\.micro_batch was None, is now 4",
            id="another pin",
        ),
    ],
)
def test_another_spec_under_the_same_name_is_refused(tmp_path: Path, changed: StudySpec, found: str) -> None:
    run(tmp_path, spec(trials=1))
    with pytest.raises(UserError, match=found):
        run(tmp_path, changed)


def test_another_environment_is_refused(tmp_path: Path) -> None:
    run(tmp_path, spec(trials=1))
    with Storage.open(url(tmp_path)) as storage:
        stored = storage.load(NAME)
        assert stored
        facts = stored.facts.model_copy(update={"environment": {**stored.facts.environment, "torch": "2.14.0"}})
        with pytest.raises(UserError, match=r"torch was '2\.13\.0', is now '2\.14\.0'"):
            open_study(spec(), name=NAME, storage=storage, facts=facts, folder_root=tmp_path)


def test_a_cache_folder_that_inductor_cannot_use_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "my projects"
    folder.mkdir()
    with pytest.raises(MachineError, match=r"my projects.*path holds a blank"):
        run(folder, spec(trials=1))
    assert not (folder / NAME).exists()
    with Storage.open(url(folder)) as storage:
        assert storage.names() == []


def test_a_global_batch_that_no_micro_batch_divides_is_refused(tmp_path: Path) -> None:
    asked = spec(trials=1)
    odd = asked.model_copy(update={"workload": asked.workload.model_copy(update={"global_batch": 7})})
    with pytest.raises(UserError, match="divides the global batch"):
        run(tmp_path, odd)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        pytest.param("workload_error", UserError, id="the workload's fault"),
        pytest.param("infrastructure", MachineError, id="the machine's fault"),
        pytest.param("unknown", MachineError, id="nobody knows"),
    ],
)
def test_a_failed_preflight_writes_nothing(tmp_path: Path, kind: str, error: type[Exception]) -> None:
    executor = LocalExecutor(make_python(tmp_path), threading.Event())
    with pytest.raises(error, match=f"fails with {kind}"):
        preflight(spec(fake_preflight=kind), executor, folder_root=tmp_path / "studies")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fake-python"]


def test_a_preflight_works_on_the_disk_of_the_caches(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$3" > {shown}\n')
    python.chmod(0o755)
    with pytest.raises(MachineError):
        preflight(spec(), LocalExecutor(str(python), threading.Event()), folder_root=tmp_path / "not" / "yet")
    assert Path(shown.read_text().strip()).parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python", "shown"]


def test_a_preflight_may_take_no_longer_than_the_budget(tmp_path: Path) -> None:
    executor = LocalExecutor(make_python(tmp_path), threading.Event())
    with pytest.raises(UserError, match="took longer than its 1 s"):
        preflight(spec(budget=1, fake_preflight="hang"), executor, folder_root=tmp_path)


@contextmanager
def coordinator(folder: Path, options: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.isolation.studies", str(folder), json.dumps(options)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def kept(folder: Path, name: str = NAME) -> list[TrialRecord]:
    with Storage.open(url(folder)) as storage:
        return storage.records(name)


def used_seconds(folder: Path) -> float:
    with Storage.open(url(folder)) as storage:
        stored = storage.load(NAME)
        assert stored is not None
        return stored.used_seconds


def searched(records: tuple[TrialRecord, ...]) -> list[TrialRecord]:
    return [record for record in records if record.role is not Role.CONFIRM]


def trials(folder: Path) -> list[Path]:
    return sorted((folder / NAME / "trials").iterdir(), key=lambda path: int(path.name))


def wait_for_trial(folder: Path, number: int) -> None:
    """Until the slice of this trial runs."""
    wait_until((folder / NAME / "trials" / str(number) / "progress.json").exists)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def slices_of(folder: Path) -> list[str]:
    """Living processes that work in this folder's trials."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "autocompile.slice" in text and str(folder) in text:
            found.append(text)
    return found
