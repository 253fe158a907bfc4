"""What a slice on this machine inherits, and interpreters that are none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import autocompile
from autocompile.executors.local import LocalExecutor
from autocompile.records import Failed, FailureKind
from autocompile.space import defaults
from autocompile.spec import FULL_DEPTH, MeasureRequest, Role, WorkloadSpec

PACKAGE = Path(autocompile.__file__).parent


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


RUN_INSTALLED = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from autocompile.executors.local import LocalExecutor
from autocompile.spec import MeasureRequest
LocalExecutor(sys.argv[2], threading.Event()).run(MeasureRequest.model_validate_json(sys.argv[4]), Path(sys.argv[3]))
"""


def test_another_interpreter_finds_the_installed_package_and_nothing_beside_it(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    shutil.copytree(PACKAGE, installed / "autocompile", ignore=shutil.ignore_patterns("__pycache__"))
    (installed / "decoy.py").write_text("")
    shown = tmp_path / "shown.json"
    code = (
        "import json, importlib.util as u; found = [getattr(u.find_spec(name), 'origin', None) "
        f"for name in ('autocompile', 'decoy')]; json.dump(found, open({str(shown)!r}, 'w'))"
    )
    other = program(tmp_path, f'#!/bin/sh\ncd /\nexec {sys.executable} -S -c "{code}"\n')
    asked = request(tmp_path).model_dump_json()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TMPDIR"] = str(tmp_path)
    folder = tmp_path / "trial"
    folder.mkdir()
    command = [sys.executable, "-c", RUN_INSTALLED, str(installed), other, str(folder), asked]
    subprocess.run(command, check=True, env=environment, cwd=folder, timeout=60)
    package, decoy = json.loads(shown.read_text())
    assert Path(package).name == "__init__.py"
    assert decoy is None
    assert not list(tmp_path.glob("autocompile-*"))  # the link is gone with the executor


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


@pytest.mark.parametrize("kept", [True, False])
def test_bytecode_has_a_place_where_the_image_keeps_none(tmp_path: Path, kept: bool) -> None:
    torch = tmp_path / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    if kept:
        (torch / "__pycache__").mkdir()
    asked = (
        "from pathlib import Path; from autocompile.executors import local; print(local._bytecode({}, Path('/c/key')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.getcwd()])}
    done = subprocess.run(
        [sys.executable, "-B", "-c", asked], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == str({} if kept else {"PYTHONPYCACHEPREFIX": "/c/.bytecode"})
