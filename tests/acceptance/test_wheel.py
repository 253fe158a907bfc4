"""The wheel alone, installed elsewhere, runs a study from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BUDGET_SECONDS = 90
GRACE_SECONDS = 15


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the wheel is installed into; its dependencies are those of this interpreter."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = wheels.glob("torch_autocompile-*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    return target


def child(installed, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUDGET_SECONDS + 120, check=False
    )


@pytest.mark.timeout(BUDGET_SECONDS + 300)
def test_the_wheel_runs_a_study_from_an_empty_folder(installed, tmp_path):
    where = child(installed, tmp_path, "-c", "import autocompile; print(autocompile.__file__)")
    assert where.stdout.strip() == str(installed / "autocompile" / "__init__.py")

    start = time.monotonic()
    words = ("--model", "tiny-llama", "--search-space", "quick", "--seq-len", 32, "--trials", 1)
    more = ("--budget", f"{BUDGET_SECONDS}s", "--study", "first", "--json")
    ran = child(installed, tmp_path, "-m", "autocompile", "tune", *words, *more)
    took = time.monotonic() - start
    assert ran.returncode == 0, ran.stderr
    assert took < BUDGET_SECONDS + GRACE_SECONDS, ran.stderr

    document = json.loads(ran.stdout)
    assert any(trial["config"]["scope"] == "none" and trial["state"] == "COMPLETE" for trial in document["trials"])
    assert str(installed) not in ran.stdout
    best = yaml.safe_load((tmp_path / "studies" / "first" / "best.yaml").read_text())
    assert best["config"] == document["verdict"]["config"]
    assert sorted(os.listdir(tmp_path)) == ["studies"]


def test_the_wheel_ships_its_data(installed):
    package = installed / "autocompile"
    assert {path.stem for path in (package / "search_spaces").glob("*.yaml")} >= {"default", "qlora", "quick"}
    assert (package / "catalogue.yaml").is_file()
    assert list((package / "storage" / "migrations").rglob("*.py"))
    assert (installed / "bin" / "autocompile").is_file()
