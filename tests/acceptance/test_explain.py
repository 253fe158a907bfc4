"""`autocompile explain` as a user types it, on studies of the fake child."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.acceptance.test_commands import SPACE, STUDY, run, shown, words
from tests.contract.fake_child import make_python


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder in which the commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "space.yaml").write_text(SPACE)
    make_python(tmp_path)
    return folder


def test_a_study_explained(here: Path) -> None:
    assert run(here, *words(here, "--budget", "90s", fake_oom_above=2))[0] == 0
    code, out, err = run(here, "explain", STUDY)
    assert code == 0, err
    assert out.startswith(f"{STUDY}: ")
    assert ", the verdict's config: layer" in out
    assert str(here) not in out

    trials = shown(here)["trials"]
    full = [trial["number"] for trial in trials if trial.get("failure")]
    assert len(full) > 1
    assert out.count("Tried to allocate 2.00 GiB (trials ") == 1, "a cause is told once"
    assert f"(trials {', '.join(map(str, full))})" in out
    assert out.count("halve micro_batch") == 1

    code, out, err = run(here, "explain", STUDY, "--trial", str(full[1]))
    assert code == 0, err
    assert out.splitlines()[0].startswith(f"trial {full[1]}, ")
    assert "outcome      oom in warmup: CUDA out of memory. Tried to allocate 2.00 GiB" in out
    assert "; trial " in out, "the study has tried the smaller batch"

    (command,) = [line.split("try", 1)[1] for line in out.splitlines() if line.startswith("    try ")]
    python = ("--python", str(here.parent / "fake-python"), "--search-space", "space.yaml", "--study", "again")
    code, _, err = run(here, *shlex.split(command)[1:], *python)
    assert code == 0, err
    code, out, _ = run(here, "explain", "again")
    assert "oom" not in out, "what was advised works"


def test_what_does_not_exist_is_one_line_with_what_does(here: Path) -> None:
    code, out, err = run(here, "explain", "firts")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert run(here, *words(here, "--budget", "60s", "--trials", 1))[0] == 0
    for command in ("explain", "gc"):
        complaint = f'autocompile: no study "firts"; did you mean {STUDY}?\n'
        assert run(here, command, "firts") == (2, "", complaint)
    code, out, err = run(here, "explain", STUDY, "--trial", "99")
    assert (code, out) == (2, "")
    assert err.startswith(f"autocompile: --trial: study {STUDY} has no trial 99; it has trials 0 to ")
    assert err.count("\n") == 1
