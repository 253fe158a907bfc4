"""`autocompile doctor`: the checks that come before every study, printed, each with what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autocompile.cli.flags import StorageFlag
from autocompile.cli.output import console
from autocompile.errors import AutocompileError, MachineError
from autocompile.place import STORAGE, STUDIES

if TYPE_CHECKING:
    from autocompile.machine import Finding

Python = Annotated[str | None, typer.Option("--python", metavar="PATH", help="Interpreter that runs the slices.")]


def doctor(storage: StorageFlag = STORAGE, python: Python = None) -> None:
    """Check this machine: libraries, compilers, GPUs, cache folder, database, and that two lines compile."""
    findings = [*_machine(), _database(storage)]
    problems = [finding.missing for finding in findings if finding.missing]
    if not problems:
        print("compiling two lines, which takes up to a minute ...", file=sys.stderr)
        findings.append(_preflight(python or sys.executable))
        problems = [finding.missing for finding in findings if finding.missing]
    _show(findings)
    if problems:
        raise MachineError("; ".join(problems))


def _show(findings: Sequence[Finding]) -> None:
    """What is wrong is said again in the table, where the rest of the machine stands beside it."""
    from rich.table import Table

    table = Table("what", "found", "what to do")
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        style = "red" if finding.missing else None
        table.add_row(finding.what, finding.found, finding.missing or "", style=style)
    console().print(table)


def _machine() -> Iterator[Finding]:
    from autocompile import machine

    yield machine.python()
    yield from machine.packages()
    yield machine.triton(machine.installed("torch"), machine.installed("triton"), machine.requirements("torch"))
    gpus = machine.gpus()
    yield from gpus
    has_gpu = gpus[0].what == "driver"
    yield from machine.compilers(gpu=has_gpu)
    yield machine.cache_folder(Path(STUDIES), gpu=has_gpu)


def _database(url: str) -> Finding:
    from autocompile.machine import Finding
    from autocompile.storage.asking import ask

    try:
        return Finding(what="database", found=ask(url))
    except MachineError as error:
        return Finding(what="database", found="does not answer", missing=str(error))


def _preflight(python: str) -> Finding:
    """What every study begins with, for a small model; nothing of it remains."""
    import tempfile
    import threading
    import time

    from autocompile.executors.local import LocalExecutor
    from autocompile.machine import Finding
    from autocompile.settings import Settings, study_spec
    from autocompile.tuner import preflight
    from autocompile.tuner.leftovers import WORKPLACE

    spec = study_spec(Settings(model="tiny-llama", search_space="quick", budget="5m"))
    near = next(path for path in (Path(STUDIES).absolute(), *Path(STUDIES).absolute().parents) if path.is_dir())
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=near, prefix=WORKPLACE) as folder:
            seeded = Path(STUDIES, ".seed").is_dir()
            executor = LocalExecutor(python, threading.Event(), warm=False)
            facts = preflight(spec, executor, folder_root=Path(STUDIES) if seeded else Path(folder))
    except AutocompileError as error:
        return Finding(what="compile", found="fails", missing=str(error))
    device = facts.devices[0]
    return Finding(what="compile", found=f"works on {device.name}, in {time.monotonic() - began:.0f} s")
