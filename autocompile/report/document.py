"""The study as one JSON document that can be published as it is: no absolute paths, no hosts, no users."""

from __future__ import annotations

import getpass
import re
import socket
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autocompile.records import Failed, Measured, TrialRecord
from autocompile.report.study import Study

_PACKAGES = re.compile(r"(?:[A-Za-z]:)?/[^\s'\":,;()]*?/(?:site|dist)-packages/")
_STANDARD_LIBRARY = re.compile(r"/[^\s'\":,;()]*?/lib(?:64)?/(?=python3\.\d+/)")
_HOMES = re.compile(r"(?<![\w.])(?:/(?:home|Users)/[^/\s'\":,;()]+|/root(?=[/\s'\":,;()]|$))")
_CACHE_OF_USER = re.compile(r"torchinductor_[^/\s'\":,;()]+")
_SENTENCE_OR_PATH = re.compile(r"[\s/:]")  # a bare word is a value of ours, though a user may have its name
_COMMON_WORDS = ("root", "localhost", "user", "main", "test", "cuda", "torch")


@dataclass(frozen=True, kw_only=True)
class Places:
    """What may not appear in a published document: ``folders`` become relative, ``names`` are left out."""

    folders: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def places_here(script: str | None) -> Places:
    """This process's own places; ``script`` is the workload's FILE.py:FUNCTION, if there is one."""
    workload = [str(Path(script.rpartition(":")[0]).resolve().parent)] if script else []
    package = str(Path(__file__).resolve().parents[2])
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *workload, str(Path.cwd()), package]
    try:
        user = [getpass.getuser()]
    except (OSError, KeyError):  # a container whose user id has no name
        user = []
    return Places(folders=tuple(dict.fromkeys(folders)), names=(socket.gethostname(), *user))


def scrub(text: str, places: Places) -> str:
    """The text with absolute paths made relative and the names of hosts and users left out."""
    text = _PACKAGES.sub("", text)
    for folder in sorted(places.folders, key=len, reverse=True):
        if len(folder) > 1:
            text = re.sub(rf"(?<![\w.]){re.escape(folder)}(?:/|(?![\w.-]))", _relative, text)
    text = _CACHE_OF_USER.sub("torchinductor", _HOMES.sub("~", _STANDARD_LIBRARY.sub("", text)))
    for name in places.names if _SENTENCE_OR_PATH.search(text) else ():
        if len(name) > 2 and name not in _COMMON_WORDS:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?:\.[a-z][\w-]*)*(?![\w-])", "...", text)
    return text


def document(study: Study, places: Places) -> dict[str, Any]:
    """The whole study in plain JSON values, as `show --json` prints it."""
    found = {
        "study": study.name,
        "spec": study.spec.model_dump(mode="json"),
        "facts": study.facts.model_dump(mode="json", exclude={"type"}),
        "budget": {"total_seconds": study.total_seconds, "used_seconds": study.used_seconds},
        "trials": [_trial(record) for record in study.records],
        "derived": [derived.model_dump(mode="json") for derived in study.derived],
        "verdict": study.verdict.model_dump(mode="json"),
    }
    return {key: _scrubbed(value, places) for key, value in found.items()}


def _relative(match: re.Match[str]) -> str:
    return "" if match[0].endswith("/") else "."


def _trial(record: TrialRecord) -> dict[str, Any]:
    plain = record.model_dump(mode="json", exclude={"outcome", "seconds"})
    match record.outcome:
        case Measured(measurement=measurement, telemetry=telemetry):
            found: dict[str, Any] = {"measurement": measurement.model_dump(mode="json")}
        case Failed(failure=failure, telemetry=telemetry):
            found = {"failure": failure.model_dump(mode="json")}
        case None:
            return {**plain, "telemetry": None}
    return {**plain, **found, "telemetry": telemetry.model_dump(mode="json")}


def _scrubbed(value: Any, places: Places) -> Any:
    match value:
        case str():
            return scrub(value, places)
        case list():
            return [_scrubbed(item, places) for item in value]
        case dict():
            return {key: _scrubbed(item, places) for key, item in value.items()}
        case _:
            return value
