"""What importing costs: nothing heavy at import and `--help`; public names are there when asked for."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import autocompile

HEAVY = ("torch", "optuna", "sqlalchemy", "alembic", "transformers", "peft", "numpy")
LIMIT_SECONDS = 0.3


def child(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout


def child_seconds(code):
    """The best of some runs: the machine may be busy, and only the work itself is asked for."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        child(code)
        times.append(time.perf_counter() - start)
    return min(times)


HELP = """
import sys
sys.argv = ["autocompile", "--help"]
from autocompile.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import sys, autocompile", id="import autocompile"),
        pytest.param(HELP, id="autocompile --help"),
    ],
)
def test_nothing_heavy_is_imported(code):
    output = child(f"{code}\nprint('LOADED', *sorted(sys.modules))")
    loaded = set(output.rsplit("LOADED", 1)[1].split())
    assert "autocompile" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import autocompile", id="import autocompile"),
        pytest.param(HELP, id="autocompile --help"),
    ],
)
def test_it_takes_little_more_than_a_bare_interpreter(code):
    bare = child_seconds("pass")
    busy = bare / 0.02  # how much slower than an idle machine's 20 ms this one is now
    assert child_seconds(code) - bare < LIMIT_SECONDS * max(1.0, busy)


def test_the_package_lists_what_it_has():
    assert set(autocompile.__all__) <= set(dir(autocompile))
    assert set(autocompile._HOMES) | {"__version__"} == set(autocompile.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'fly'"):
        autocompile.fly  # noqa: B018


@pytest.mark.parametrize("name", sorted(autocompile.__all__))
def test_every_public_name_resolves(name):
    assert getattr(autocompile, name) is not None
