"""What studies take of the disk: `gc` and `rm` free it, caps hold it down, and nothing measured is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.acceptance.test_commands import FOLDER, SPACE, STUDY, processes_in, run, shown, started, wait_until, words
from tests.contract.fake_child import make_python

CACHE_KIB = 256


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder in which the commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "space.yaml").write_text(SPACE)
    make_python(tmp_path)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_gc_frees_caches_and_leaves_what_was_measured(here: Path) -> None:
    command = words(here, "--budget", "60s", "--trials", 3, fake_cache_kib=CACHE_KIB)
    assert run(here, *command)[0] == 0
    stray = here / FOLDER / "trials" / "99"
    stray.mkdir()
    (stray / "log.txt").write_text("of a trial that is none")
    before, document = files(here / FOLDER), shown(here)
    kept = {name: text for name, text in before.items() if not name.startswith(("cache/", "trials/99/"))}
    assert {"spec.yaml", "facts.json", "best.yaml", "report.md", "trials/0/outcome.json", "trials/0/log.txt"} <= set(
        kept
    )

    code, out, err = run(here, "gc", "--dry-run")
    assert code == 0, err
    assert f"{STUDY}: 1 folders of trials that it does not have, " in out
    assert out.splitlines()[-1].endswith("would be freed")
    assert files(here / FOLDER) == before

    code, out, err = run(here, "gc", STUDY)
    assert code == 0, err
    assert f"{STUDY}: {len(list((here / FOLDER / 'trials').iterdir()))}" not in out
    assert "compile caches" in out
    assert out.splitlines()[-1].endswith(" freed")
    assert files(here / FOLDER) == kept
    assert run(here, "gc")[1] == "0 KiB freed\n"
    assert shown(here) == document
    assert run(here, *command)[0] == 0, "and the study goes on"


def test_gc_does_not_touch_a_study_in_use(here: Path) -> None:
    with started(here, words(here, "--budget", "90s", fake="hang", fake_when="scope=layer")) as process:
        wait_until(lambda: len(list((here / FOLDER).glob("cache/*/compiled"))) > 1)
        before = files(here / FOLDER / "cache")
        code, out, _ = run(here, "gc")
        assert code == 0
        assert f"study {STUDY} is in use by pid {process.pid}" in out and "left alone" in out
        code, out, err = run(here, "gc", STUDY)
        assert (code, out) == (2, "")
        assert f"study {STUDY} is in use by pid {process.pid}" in err
        assert run(here, "rm", STUDY, "--yes")[0] == 2
        assert before.items() <= files(here / FOLDER / "cache").items()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert before
    assert "compile caches" in run(here, "gc")[1]


def test_gc_removes_the_workplace_of_a_check_that_was_killed(here: Path) -> None:
    def workplaces() -> list[Path]:
        return list(here.glob(".autocompile-*"))

    with started(here, words(here, fake_preflight="hang")) as process:
        wait_until(lambda: [place for place in workplaces() if (place / "request.json").exists()])
        assert run(here, "gc")[0] == 0
        assert workplaces(), "it is in use"
        process.kill()
        process.communicate()
    wait_until(lambda: not processes_in(here))
    code, out, err = run(here, "gc")
    assert code == 0, err
    assert "1 workplaces of checks that were killed" in out
    assert not workplaces()


def test_rm_frees_caches_that_lie_elsewhere(here: Path) -> None:
    spec_file = with_spec(here, cache_root=str(here / "root"))
    code, _, err = run(here, *spec_file)
    assert code == 0, err
    assert bytes_below(here / "root") > CACHE_KIB * 1024
    assert run(here, "rm", STUDY, "--yes")[0] == 0
    assert bytes_below(here / "root") == 0
    assert not (here / FOLDER).exists()


def test_caches_of_configs_that_cannot_win_are_evicted_above_the_cap(here: Path) -> None:
    """Six of eight configs run out of memory; what they compiled is not kept beside that of the others."""
    cap = 4 * CACHE_KIB * 1024
    code, _, err = run(here, *with_spec(here, cache_bytes=cap, fake_oom_above=1))
    assert code == 0, err
    assert len(list((here / FOLDER / "trials").iterdir())) > 6
    assert bytes_below(here / FOLDER / "cache") <= cap + CACHE_KIB * 1024
    best = yaml.safe_load((here / FOLDER / "best.yaml").read_text())
    assert best["config"]["micro_batch"] == 1


def with_spec(here: Path, *, fake_oom_above: int = 8, **fields: object) -> list[str]:
    """`tune` with a spec file, where alone the caches' place and cap can be set."""
    space = SPACE.replace("low: 2", "low: 1").replace(
        "micro_batch:", "sdpa: {choices: [auto, math], default: auto, why: a}\n  micro_batch:"
    )
    options = {"fake_cache_kib": CACHE_KIB, "fake_oom_above": fake_oom_above}
    spec = {
        "workload": {"script": "job.py:build", "options": options},
        "space": yaml.safe_load(space),
        "plan": {"type": "grid"},
        **fields,
    }
    (here / "spec.yaml").write_text(yaml.safe_dump(spec))
    python = str(here.parent / "fake-python")
    return ["tune", "--spec", "spec.yaml", "--budget", "90s", "--study", STUDY, "--python", python]


def test_a_log_does_not_fill_the_disk(here: Path) -> None:
    command = words(here, "--budget", "60s", "--trials", 1, fake="chatter", fake_when="scope=none")
    code, _, err = run(here, *command)
    assert code == 0, err
    log = (here / FOLDER / "trials" / "0" / "log.txt").read_bytes()
    assert len(log) < 17 * 1024**2
    assert log.startswith(b"the first line\n")
    assert log.rstrip().endswith(b"the last line")
    assert b"bytes left out ...]" in log
    assert os.listdir(here / FOLDER / "trials" / "0").count("outcome.json") == 1
