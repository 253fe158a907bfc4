"""What goes wrong in slices, through the real command: its name, its treatment, and what the study makes of it.

Slices are real where torch has to fail by itself, and a fake child's where a dying process has to be played.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import autocompile
from autocompile.tuner.folders import copy_seed
from tests.acceptance.test_commands import FOLDER, STUDY, processes_in, run, shown, words
from tests.contract.fake_child import make_python
from tests.unit.failure_lines import DISGUISED, NEVER_OOM, PLAIN

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "workload_examples" / "faults.py"
TRIALS = FOLDER / "trials"
WARM = ROOT / ".cache" / f"acceptance-seed-{version('torch')}"
Trial = dict[str, Any]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """The folder in which the commands run; its preflight finds compiled what an earlier test's preflight compiled."""
    folder = tmp_path / "here"
    folder.mkdir()
    make_python(tmp_path)
    seed = folder / "studies" / ".seed"
    copy_seed(WARM, seed)
    yield folder
    if any(seed.rglob("*.so")):  # a fake child's is empty
        copy_seed(seed, WARM)


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where compiled code goes when the usual place does not take it. Real slices would miss torch's headers there."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return str(folder)


def one(*values: object) -> dict[str, Any]:
    return {"choices": list(values), "default": values[0], "why": "a test"}


def space(folder: Path, **parameters: object) -> None:
    (folder / "space.yaml").write_text(yaml.safe_dump({"format": 1, "parameters": parameters}))


def real(folder: Path, function: str = "build", *, cache_root: str | None = None, **options: object) -> list[str]:
    """`tune` with every config of the space once, in real slices of a workload that goes wrong."""
    parameters = yaml.safe_load((folder / "space.yaml").read_text())["parameters"]
    spec = {
        "workload": {"script": f"{FAULTS}:{function}", "options": options, "device": "cpu"},
        "space": {"format": 1, "parameters": {"micro_batch": one(2), **parameters}},
        "plan": {"type": "grid"},
        "cache_root": cache_root,
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return ["tune", "--spec", "spec.yaml", "--study", STUDY, "--budget", "4m", "--json"]


def fake(folder: Path, *more: object, budget: str = "4m", **options: object) -> list[str]:
    return words(folder, "--budget", budget, "--json", *more, **options)


def tuned(folder: Path, command: list[str], *, code: int = 0) -> tuple[list[Trial], str]:
    """The study's trials and what was told while it ran. Whatever happens, eager once measured is usable."""
    ended, out, err = run(folder, *command, timeout=240)
    assert ended == code, err
    trials = json.loads(out)["trials"] if code == 0 else shown(folder)["trials"]
    assert not [trial for trial in trials if trial["state"] == "RUNNING"]
    if any(trial["state"] == "COMPLETE" and trial["config"]["scope"] == "none" for trial in trials):
        best = autocompile.load(folder / FOLDER / "best.yaml")
        assert best.expected.tokens_per_second[0] > 0
    return trials, err


def kinds(trials: list[Trial]) -> list[str]:
    """The failure of each trial, or that it was measured."""
    return [trial["failure"]["kind"] if "failure" in trial else "measured" for trial in trials]


def of(trials: list[Trial], **knobs: object) -> list[Trial]:
    return [trial for trial in trials if knobs.items() <= trial["config"].items()]


def request(folder: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / TRIALS / str(number) / "request.json").read_text())
    return found


@pytest.mark.parametrize("seed", range(5))
def test_out_of_memory_teaches_the_sampler(here: Path, seed: int) -> None:
    space(here, micro_batch={"low": 1, "high": 64, "scale": "linear", "default": 4, "why": "a test"})
    command = fake(here, "--trials", 60, "--seed", seed, "--set", "scope=none", fake_oom_above=32, fake_device="cuda")
    trials, _ = tuned(here, command)
    searched = [trial for trial in trials if trial["role"] != "confirm"]
    late = searched[20:]
    assert len(late) >= 10
    assert sum(trial["config"]["micro_batch"] > 32 for trial in late) <= 0.6 * len(late)
    assert {trial["state"] for trial in searched if trial["config"]["micro_batch"] > 32} == {"PRUNED"}
    assert "FAIL" not in {trial["state"] for trial in trials}
    assert max(searched, key=lambda trial: trial["value"] or 0)["config"]["micro_batch"] == 32


def test_silently_eager_frames_are_a_recompile_storm(here: Path) -> None:
    """In the second config fullgraph makes torch raise where the first one's frames went eager."""
    space(
        here,
        scope=one("layer"),
        cache_size_limit=one(2),
        dynamic=one("auto", "false"),
        fullgraph=[{**one(True), "when": {"dynamic": ["false"]}}, one(False)],
    )
    trials, _ = tuned(here, real(here, fault="index"), code=1)
    assert kinds(trials) == ["recompile_storm", "recompile_storm"]
    assert [trial["config"]["fullgraph"] for trial in trials] == [False, True]
    assert {trial["state"] for trial in trials} == {"PRUNED"}
    for trial in trials:
        assert any("module.index == " in recompile["guard"] for recompile in trial["telemetry"]["recompiles"])
    assert "recompile of layer:Block: module.index == " in (here / FOLDER / "report.md").read_text()
    assert not (here / FOLDER / "best.yaml").exists()


def test_a_break_under_fullgraph_rules_out_fullgraph(here: Path) -> None:
    space(
        here,
        scope=one("layer"),
        fullgraph=one(True, False),
        dynamic=[{**one("auto", "false"), "when": {"fullgraph": [True]}}, one("auto")],
    )
    (broken, without), _ = tuned(here, real(here, fault="branch"))
    assert (broken["failure"]["kind"], broken["state"]) == ("graph_break", "PRUNED")
    place, line = broken["failure"]["where"].split(":")
    assert place.endswith("faults.py") and int(line) > 0
    (skipped,) = shown(here)["derived"]
    assert skipped["config"]["dynamic"] == "false" and skipped["config"]["fullgraph"]
    assert "trial 0" in skipped["reason"]
    assert without["value"] > 0
    assert without["telemetry"]["graph_breaks"]


def test_slices_share_no_compiler(here: Path) -> None:
    """Two graphs are the limit, and what one config needs: in one process the second config would go beyond it."""
    space(here, scope=one("layer"), cache_size_limit=one(2), micro_batch=one(*range(2, 12)))
    trials, _ = tuned(here, real(here))
    assert kinds(trials) == ["measured"] * 10
    for trial in trials:
        assert (trial["telemetry"]["graphs"], trial["telemetry"]["compile_applied"]) == (2, "all")
        assert "limit" not in (here / TRIALS / str(trial["number"]) / "log.txt").read_text()


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in a grandchild of the slice, on the code of a trial alone: the preflight's has to compile."""
    compiler = here.parent / "g++"  # by its usual name, so that the preflight finds its own code compiled
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in */cache/*main.cpp*) sleep 600 ;; esac\nexec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(here.parent), prepend=os.pathsep)
    space(here, scope=one("layer", "none"))
    seconds = 60 if WARM.is_dir() else 120  # what a bare CPU's preflight compiles counts
    began = time.monotonic()
    trials, _ = tuned(here, [*real(here), "--budget", f"{seconds}s"])
    assert time.monotonic() - began < seconds + 15
    assert not processes_in(here)
    hung = trials[0]
    assert (hung["failure"]["kind"], hung["state"]) == ("compile_timeout", "PRUNED")
    assert hung["failure"]["stage"] == "compile"
    assert kinds(trials) == ["compile_timeout", "measured"]  # our own kill is no want of memory, and the study goes on


@pytest.mark.parametrize("through_a_shell", [False, True])
def test_a_killed_slice_is_repeated_with_one_compile_thread(here: Path, through_a_shell: bool) -> None:
    space(
        here, scope=one("none", "layer"), micro_batch={"low": 2, "high": 8, "scale": "log2", "default": 4, "why": "x"}
    )
    if through_a_shell:
        python = here.parent / "fake-python"
        python.write_text(python.read_text().replace("exec ", "") + "exit $?\n")
    trials, _ = tuned(here, fake(here, "--trials", 5, fake="kill", fake_when="scope=layer,micro_batch=4"))
    killed = of(trials, scope="layer", micro_batch=4)
    assert kinds(killed) == ["host_oom", "host_oom"]
    assert {trial["state"] for trial in killed} == {"PRUNED"}
    assert [request(here, trial["number"])["compile_threads"] for trial in killed] == [None, 1]
    assert kinds([trial for trial in trials if trial not in killed]) == ["measured"] * (len(trials) - 2)


def test_a_host_without_memory_ends_the_study(here: Path) -> None:
    space(
        here, scope=one("none", "layer"), micro_batch={"low": 1, "high": 8, "scale": "log2", "default": 4, "why": "x"}
    )
    trials, err = tuned(here, fake(here, fake="kill"), code=3)
    assert set(kinds(trials)) == {"host_oom"}
    assert "3 configs in a row ran out of the host's memory" in err.splitlines()[-1]


MEMORY_GROUPS = {
    "scope": one("none", "layer", "attention", "mlp", "model"),
    "sdpa": one("auto", "flash", "efficient", "cudnn", "math"),
    "gradient_checkpointing": one(False, True),
    "micro_batch": one(4),
}


def dying(here: Path, texts: list[str], share: float) -> list[Trial]:
    """The trials that print these texts and exit, one after the other, each on a device this full."""
    space(here, **MEMORY_GROUPS)
    (here / "texts.json").write_text(json.dumps(texts))
    spec = {
        "workload": {
            "script": "job.py:build",
            "options": {
                "fake": "text",
                "fake_texts": str(here / "texts.json"),
                "fake_once": True,
                "fake_share": share,
                "fake_device": "cuda",
            },
        },
        "space": yaml.safe_load((here / "space.yaml").read_text()),
        "plan": {"type": "grid"},
    }
    (here / "spec.yaml").write_text(yaml.safe_dump(spec))
    python = str(here.parent / "fake-python")
    command = ["tune", "--spec", "spec.yaml", "--study", STUDY, "--budget", "4m", "--json", "--python", python]
    trials, _ = tuned(here, command)
    died = [trial for trial in trials if "failure" in trial]
    assert len(died) >= len(texts)
    return died[: len(texts)]


def test_an_ambiguous_text_is_out_of_memory_on_a_full_device(here: Path) -> None:
    died = dying(here, [*PLAIN, *DISGUISED], 0.97)
    assert kinds(died) == ["oom"] * len(died)
    assert {trial["state"] for trial in died} == {"PRUNED"}


def test_an_ambiguous_text_is_a_fault_of_the_gpu_on_an_empty_one(here: Path) -> None:
    died = dying(here, [*PLAIN, *DISGUISED], 0.20)
    assert kinds(died) == ["oom"] * len(PLAIN) + ["gpu_fault"] * len(DISGUISED)
    assert {trial["state"] for trial in died[len(PLAIN) :]} == {"FAIL"}


def test_other_exhaustions_are_never_the_device_s(here: Path) -> None:
    assert "oom" not in kinds(dying(here, NEVER_OOM, 0.97))


@pytest.mark.parametrize(
    ("variable", "value", "lacking"),
    [
        pytest.param("CXX", "/nonexistent", " (now CXX=/nonexistent)", id="a wrong CXX"),
        pytest.param("PATH", "", "", id="nothing on the path"),
    ],
)
def test_without_a_compiler_there_is_no_study(
    here: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, lacking: str
) -> None:
    """Even where a warm cache would hide that it is missing."""
    space(here, scope=one("none", "layer"))
    command = real(here)
    monkeypatch.setenv(variable, value)
    code, out, err = run(here, *command)
    assert (code, out) == (3, "")
    assert err.splitlines()[1:] == [f"autocompile: no working C++ compiler: install g++ or set CXX{lacking}"]
    assert not (here / FOLDER).exists()
    assert run(here, "show", STUDY)[0] == 2


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[str]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield str(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts file systems")
def test_where_no_disk_takes_compiled_code_there_is_no_study(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space(here, scope=one("none", "layer"))
    with mounted(here.parent / "noexec", "size=2g,noexec") as noexec, mounted(here.parent / "full", "size=64k") as full:
        monkeypatch.setenv("TMPDIR", full)
        code, out, err = run(here, *real(here, cache_root=noexec))
    assert (code, out) == (3, "")
    assert noexec in err.splitlines()[-1] and full in err.splitlines()[-1]
    assert "noexec" in err and "GiB free" in err
    assert not (here / FOLDER).exists()


def test_a_cache_folder_that_is_none_is_replaced(here: Path, spare: str) -> None:
    """A plain file stands where the study's caches shall lie."""
    (here / FOLDER).mkdir(parents=True)
    (here / FOLDER / "cache").write_text("")
    space(here, scope=one("none", "layer"), micro_batch=one(4))
    trials, _ = tuned(here, fake(here, "--trials", 2))
    assert kinds(trials[:1]) == ["infrastructure"]
    assert str(FOLDER / "cache") in trials[0]["failure"]["message"]
    assert set(kinds(trials[1:])) == {"measured"} and "PRUNED" not in {trial["state"] for trial in trials}
    assert all(request(here, trial["number"])["cache_folder"].startswith(spare) for trial in trials[1:])


def test_a_disk_that_fills_up_ends_the_study_after_another_was_tried(here: Path, spare: str) -> None:
    space(here, scope=one("none", "layer"), micro_batch=one(4))
    text = "OSError: [Errno 28] No space left on device"
    trials, err = tuned(here, fake(here, fake="text", fake_text=text, fake_when="scope=layer"), code=3)
    broken = of(trials, scope="layer")
    assert kinds(broken) == ["infrastructure", "infrastructure"]
    assert {trial["state"] for trial in broken} == {"FAIL"}
    first, second = (request(here, trial["number"])["cache_folder"] for trial in broken)
    assert first != second and second.startswith(spare)
    assert "compiled code can be kept nowhere" in err.splitlines()[-1] and second in err.splitlines()[-1]


def test_an_attention_kernel_that_cannot_run_is_named_with_the_reason(here: Path) -> None:
    space(
        here,
        scope=one("none", "model"),
        sdpa=[{**one("auto", "efficient", "flash"), "when": {"scope": ["none"]}}, one("efficient", "flash")],
    )
    trials, _ = tuned(here, real(here, "attention", p=0.5))
    eager, *forced = trials
    assert kinds([eager]) == ["measured"]
    assert kinds(forced) == ["backend_unsupported"] * 4
    messages = [trial["failure"]["message"] for trial in forced if trial["config"]["sdpa"] == "flash"]
    assert len(messages) == 2 and all("do not support non-zero dropout" in message for message in messages)
    assert all("No viable backend" in trial["failure"]["message"] for trial in of(forced, sdpa="efficient"))
    assert all("faults.py:" in trial["failure"]["where"] for trial in forced)


def test_a_compile_error_is_tried_again_with_a_fresh_cache(here: Path) -> None:
    space(here, scope=one("none", "layer"), micro_batch=one(4))
    kind = {"fake": "failure", "fake_kind": "compile_error", "fake_when": "scope=layer"}
    trials, _ = tuned(here, fake(here, **kind, fake_once=True))
    failed = of(trials, scope="layer")
    assert kinds(failed) == ["compile_error", "compile_error"]
    assert len({request(here, trial["number"])["cache_folder"] for trial in failed}) == 2


def test_a_gpu_fault_is_tried_again_and_then_blamed_on_the_config(here: Path) -> None:
    space(here, scope=one("none", "layer"), micro_batch=one(4))
    text = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    trials, _ = tuned(here, fake(here, fake="text", fake_text=text, fake_when="scope=layer", fake_device="cuda"))
    faulted = of(trials, scope="layer", mode="default")
    assert [trial["state"] for trial in faulted] == ["FAIL", "PRUNED"]
    assert set(kinds(faulted)) == {"gpu_fault"}


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        pytest.param({"fake": "crash"}, "unknown", "nobody knows why", id="crashes that nobody can explain"),
        pytest.param(
            {"fake": "text", "fake_text": "OSError: [Errno 98] Address already in use"},
            "infrastructure",
            "failed on this machine",
            id="a machine that does not work",
        ),
    ],
)
def test_three_in_a_row_end_the_study_with_one_message(
    here: Path, behaviour: dict[str, str], kind: str, message: str
) -> None:
    space(here, scope=one("none", "layer"), dynamic=one("auto", "true", "false"), micro_batch=one(4))
    trials, err = tuned(here, fake(here, "--set", "fullgraph=true", fake_when="fullgraph=true", **behaviour), code=3)
    assert kinds(trials)[-3:] == [kind] * 3
    assert message in err.splitlines()[-1]


def test_a_study_in_which_all_but_eager_fails_brakes_and_keeps_eager(here: Path) -> None:
    space(
        here,
        scope=one("none", "layer", "model"),
        dynamic=one("auto", "true", "false"),
        cache_size_limit=one(8, 64),
        micro_batch=one(4, 8),
    )
    kind = {"fake": "failure", "fake_kind": "numerics_mismatch", "fake_when": "fullgraph=true"}
    trials, err = tuned(here, fake(here, "--set", "fullgraph=true", **kind))
    assert len(trials) <= 16  # of 26
    line = "no further search: the last 10 configs all failed, 10 of them with numerics_mismatch"
    assert line in " ".join(err.split())
    assert line in (here / FOLDER / "report.md").read_text().replace("No further", "no further")
    assert autocompile.load(here / FOLDER / "best.yaml").config["scope"] == "none"
