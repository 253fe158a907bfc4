"""What a slice on this machine inherits, and interpreters that are none."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from autocompile.executors.local import LocalExecutor
from autocompile.records import Failed, FailureKind
from autocompile.space import defaults
from autocompile.spec import FULL_DEPTH, MeasureRequest, Role, WorkloadSpec


def request(tmp_path: Path, devices: tuple[int, ...] = ()) -> MeasureRequest:
    return MeasureRequest(
        workload=WorkloadSpec(model="tiny-llama"),
        config=defaults(),
        role=Role.SEARCH,
        fidelity=FULL_DEPTH,
        seed=0,
        devices=devices,
        deadline_seconds=30,
        cache_folder=str(tmp_path / "cache"),
    )


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def run(python: str, tmp_path: Path, devices: tuple[int, ...] = ()) -> Failed:
    folder = tmp_path / "trial"
    folder.mkdir()
    answer = LocalExecutor(python, threading.Event()).run(request(tmp_path, devices), folder)
    assert isinstance(answer, Failed)
    return answer


def inherited(tmp_path: Path, devices: tuple[int, ...] = ()) -> dict[str, str]:
    """The environment that a slice sees."""
    shown = tmp_path / "environment.json"
    code = f"import json, os; json.dump(dict(os.environ), open({str(shown)!r}, 'w'))"
    run(program(tmp_path, f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n'), tmp_path, devices)
    found: dict[str, str] = json.loads(shown.read_text())
    return found


def test_the_cache_folder_is_the_config_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TORCH_COMPILE_JOB_ID", "PYTHONSTARTUP", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    found = inherited(tmp_path)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache")
    assert not {"TRITON_CACHE_DIR", "TORCH_COMPILE_JOB_ID", "PYTHONSTARTUP"} & set(found)
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_an_interpreter_without_the_package_finds_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    paths = inherited(tmp_path)["PYTHONPATH"].split(":")
    assert (Path(paths[0]) / "autocompile" / "slice").is_dir()
    assert paths[1:] == ["/elsewhere"]


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [
        pytest.param(None, (), None, id="no GPU named"),
        pytest.param("2,3", (), "2,3", id="all that are visible"),
        pytest.param(None, (1,), "1", id="one of all"),
        pytest.param("2,3", (1,), "3", id="one of those that are visible"),
    ],
)
def test_the_slice_sees_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: tuple[int, ...], seen: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert inherited(tmp_path, devices).get("CUDA_VISIBLE_DEVICES") == seen


def test_no_such_interpreter(tmp_path: Path) -> None:
    failure = run("/nonexistent/python", tmp_path).failure
    assert failure.kind is FailureKind.INFRASTRUCTURE
    assert "/nonexistent/python" in failure.message


def test_an_interpreter_that_is_no_program(tmp_path: Path) -> None:
    assert run(program(tmp_path, "no program"), tmp_path).failure.kind is FailureKind.INFRASTRUCTURE


def test_a_wrapper_around_no_interpreter(tmp_path: Path) -> None:
    python = program(tmp_path, "#!/bin/sh\nexec /nonexistent/python\n")
    assert run(python, tmp_path).failure.kind is FailureKind.INFRASTRUCTURE


def test_a_kill_told_by_a_shell(tmp_path: Path) -> None:
    python = program(tmp_path, "#!/bin/sh\nsh -c 'kill -9 $$'\nexit $?\n")
    assert run(python, tmp_path).failure.kind is FailureKind.HOST_OOM
