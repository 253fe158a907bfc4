"""Measure one config in a fresh process on this machine, and always come back with an answer.

Covered: crashes, hangs in compile and in a step, out-of-memory kills, stray grandchildren, half-written answers, an
answer followed by a hang at exit, an interpreter that does not exist, a full disk.
Not covered: what `autocompile.processes` does not cover, and hostile code.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from autocompile.errors import MachineError
from autocompile.executors.deadlines import Limits, Overdue, Pace, observe, overdue
from autocompile.executors.exits import Ending, failure_of
from autocompile.executors.logs import shorten
from autocompile.executors.warm import ForkServer
from autocompile.failure_texts import CACHE_FOLDER
from autocompile.processes import Tree, started
from autocompile.records import ANSWER, Answer, Failed, Failure, FailureKind, Progress, Stage
from autocompile.spec import Facts, MeasureRequest, PreflightRequest, Role, SliceRequest
from autocompile.values import write_aside

_TICK_SECONDS = 0.05
_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_LOG_TAIL_BYTES = 262_144  # a traceback of compiled code has thousands of lines
_ROOM_BYTES = 16_384  # for a slice's answer and the reasons of its failure
_NOT_INHERITED = ("TRITON_CACHE_DIR", "TORCH_COMPILE_JOB_ID", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE")
_PROGRESS: TypeAdapter[Progress] = TypeAdapter(Progress)

T = TypeVar("T")


class LocalExecutor:
    """Runs slices with ``python``, each as its own process tree; setting ``stop`` ends those that run.

    They are forked from a process that has imported torch. An interpreter of its own has each confirmation, since forks
    share what differs between processes (the layout of memory, the seed of hashes) and a verdict has to sample it; and
    each slice with ``warm`` false, or where none can be forked.
    """

    def __init__(self, python: str, stop: threading.Event, *, limits: Limits | None = None, warm: bool = True) -> None:
        self._python = python
        self._stop = stop
        self._limits = limits or Limits()
        self._device_memory_bytes: int | None = None  # from the preflight, which comes first
        self._package = _package(python)
        if self._package is not _PACKAGE_PARENT:
            weakref.finalize(self, shutil.rmtree, self._package.parent, ignore_errors=True)
        self._server = ForkServer(python) if warm else None
        if self._server is not None:
            weakref.finalize(self, self._server.close)

    def run(self, request: SliceRequest, folder: Path) -> Answer:
        if (broken := _lay_out(request, folder)) is not None:
            return broken
        environment = _environment(request, os.environ, self._package)
        try:
            with self._slice(request, folder, environment) as tree:
                ending = self._watch(tree, request, folder)
        except OSError as error:
            return _machine(request, f"cannot start the slice: {error}")
        shorten(folder / "log.txt")
        answer = _answer(request, folder) or self._silent(request, folder, ending)
        if isinstance(answer, Facts):
            self._device_memory_bytes = answer.devices[0].memory_bytes
        return answer

    def _slice(
        self, request: SliceRequest, folder: Path, environment: Mapping[str, str]
    ) -> AbstractContextManager[Tree]:
        log = folder / "log.txt"
        confirms = isinstance(request, MeasureRequest) and request.role is Role.CONFIRM
        if self._server is not None and not confirms and self._server.start(environment, self._stop):
            return self._server.forked(folder, environment=environment, log=log)
        command = [self._python, "-m", "autocompile.slice", str(folder)]
        return started(command, environment=environment, log=log)

    def _watch(self, tree: Tree, request: SliceRequest, folder: Path) -> Ending:
        """Until the child exits, has answered and does not exit, runs out of time, or the study is interrupted."""
        began = time.monotonic()
        answered: float | None = None
        pace = Pace()
        while (status := tree.wait(_TICK_SECONDS)) is None:
            now = time.monotonic() - began
            shorten(folder / "log.txt")
            if self._stop.is_set():
                return Ending(interrupted=True)
            if progress := _read(_PROGRESS, folder / "progress.json"):
                pace = observe(pace, progress, now)
            if answered is None and _read(ANSWER, folder / "outcome.json") is not None:
                answered = now
            if answered is not None and now - answered >= self._limits.exit_seconds:
                return Ending()  # the answer counts, the hang after it does not
            if late := overdue(pace, self._limits, deadline_seconds=request.deadline_seconds, now=now):
                cause, bound = late
                cut_short = cause is Overdue.COMPILE and bound < self._limits.compile_seconds
                return Ending(cause=cause, bound=bound, cut_short=cut_short)
        return Ending(status=status)

    def _silent(self, request: SliceRequest, folder: Path, ending: Ending) -> Failed:
        """Of a slice without an answer; on a full disk neither that nor its reasons could be written."""
        failure = failure_of(
            ending,
            _read(_PROGRESS, folder / "progress.json"),
            log_tail=_tail(folder / "log.txt"),
            first_stage=_first_stage(request),
            device_memory_bytes=self._device_memory_bytes,
        )
        if failure.kind is FailureKind.UNKNOWN and (complaint := _unwritable(folder)):
            return _machine(request, f"cannot write the slice's files: {complaint}")
        return Failed(failure=failure)


def visible_names(devices: Sequence[int], ours: Mapping[str, str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls these GPUs, which are counted among those that ours leaves visible."""
    visible = [name for name in ours.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [visible[index] if index < len(visible) else str(index) for index in devices]


def _lay_out(request: SliceRequest, folder: Path) -> Failed | None:
    """Nothing that an earlier slice left in this folder may pass for this one's answer."""
    try:
        Path(request.cache_folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _machine(request, f"cache folder {request.cache_folder}: {error.strerror}", subkind=CACHE_FOLDER)
    try:
        for name in ("outcome.json", "progress.json"):
            (folder / name).unlink(missing_ok=True)
        write_aside(folder / "request.json", request.model_dump_json(indent=2))
    except OSError as error:
        return _machine(request, f"cannot write the slice's files: {error}")
    return None


def _unwritable(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        return str(error)
    return None


def _package(python: str) -> Path:
    """The folder in which ``python`` shall find this very package, installed there or not.

    Where we are installed lie torch and all else of ours too, which may not shadow what another interpreter has: it
    gets a folder that holds a link to the package alone, named as reports know to leave out.
    """
    if python == sys.executable or _PACKAGE_PARENT.name not in ("site-packages", "dist-packages"):
        return _PACKAGE_PARENT
    try:
        folder = Path(tempfile.mkdtemp(prefix="autocompile-"), "site-packages")
        folder.mkdir()
        (folder / "autocompile").symlink_to(_PACKAGE_PARENT / "autocompile")
    except OSError as error:
        raise MachineError(f"cannot link the package for {python}: {error}") from error
    return folder


def _environment(request: SliceRequest, ours: Mapping[str, str], package_parent: Path) -> dict[str, str]:
    """Ours, less what would redirect torch's caches."""
    inherited = {name: value for name, value in ours.items() if name not in _NOT_INHERITED}
    chosen = visible_names(request.devices, ours)
    return {
        **inherited,
        **({"CUDA_VISIBLE_DEVICES": ",".join(chosen)} if chosen else {}),
        **({"CUDA_VISIBLE_DEVICES": ""} if request.workload.device == "cpu" else {}),  # wrappers would choose a GPU
        "PYTHONPATH": os.pathsep.join([str(package_parent), *filter(None, [ours.get("PYTHONPATH")])]),
        "TORCHINDUCTOR_CACHE_DIR": request.cache_folder,
        **_bytecode(ours, Path(request.cache_folder)),
    }


def _bytecode(ours: Mapping[str, str], cache_folder: Path) -> dict[str, str]:
    """Where bytecode is kept for slices if nobody else keeps it: compiling torch's sources takes 6 s in each process.

    Images for containers often forbid to write it, and ship none.
    """
    found = importlib.util.find_spec("torch")
    kept = found is not None and found.origin is not None and Path(found.origin).with_name("__pycache__").is_dir()
    if kept or "PYTHONPYCACHEPREFIX" in ours:
        return {}
    return {"PYTHONPYCACHEPREFIX": str(cache_folder.parent / ".bytecode")}


def _answer(request: SliceRequest, folder: Path) -> Answer | None:
    """What outcome.json says, however the slice ended; None where there is no such file."""
    try:
        text = (folder / "outcome.json").read_bytes()
    except OSError:
        return None
    try:
        answer = ANSWER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _machine(
            request, f"the slice's outcome.json cannot be read: {where + ': ' if where else ''}{first['msg']}"
        )
    if not isinstance(answer, Failed) and isinstance(answer, Facts) != isinstance(request, PreflightRequest):
        return _machine(request, f"the slice was asked to {request.type} and answered with {answer.type}")
    return answer


def _machine(request: SliceRequest, message: str, *, subkind: str | None = None) -> Failed:
    kind, stage = FailureKind.INFRASTRUCTURE, _first_stage(request)
    return Failed(failure=Failure(kind=kind, subkind=subkind, stage=stage, message=message))


def _first_stage(request: SliceRequest) -> Stage:
    return Stage.PREFLIGHT if isinstance(request, PreflightRequest) else Stage.BUILD


def _read(kind: TypeAdapter[T], path: Path) -> T | None:
    """What the file holds, or None while it is missing or half-written."""
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
