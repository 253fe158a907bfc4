"""What studies leave on the disk that nothing needs: compile caches, folders of trials that are none, workplaces."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autocompile.files import size_of
from autocompile.records import TrialRecord
from autocompile.spec import Facts, StudySpec
from autocompile.tuner.folders import cache_folder, cache_root, spare_root

WORKPLACE = ".autocompile-"  # of a preflight
_HALF_DONE = (".autocompile_copy.", ".autocompile_deleted.")  # copies and deletions on their way, a matter of seconds
_STALE_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Folders of one kind that may go."""

    what: str
    folders: tuple[Path, ...]

    @property
    def n_bytes(self) -> int:
        return sum(map(size_of, self.folders))


def of_study(
    spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], *, folder: Path, shared: Collection[str] = ()
) -> list[Leftover]:
    """Of a study that nobody runs. ``shared`` are names of caches, see `cache_names`, that other studies use too."""
    return [
        Leftover(what="compile caches", folders=_caches(spec, facts, records, folder, shared)),
        Leftover(what="folders of trials that it does not have", folders=_trials(records, folder)),
    ]


def cache_names(spec: StudySpec, facts: Facts, records: Sequence[TrialRecord]) -> set[str]:
    """How the caches of its configs are called wherever they lie."""
    return {cache_folder(spec, facts, record.config, study_folder=Path()).name for record in records}


def _caches(
    spec: StudySpec, facts: Facts, records: Sequence[TrialRecord], folder: Path, shared: Collection[str]
) -> tuple[Path, ...]:
    """All in the study's own folder; elsewhere those of its configs."""
    own = _folders(folder / "cache")
    names = cache_names(spec, facts, records) - set(shared)
    roots = dict.fromkeys((cache_root(spec, folder), spare_root()))
    others = [path for root in roots if root != folder / "cache" for path in _folders(root)]
    return (*own, *(path for path in others if path.name.split("-")[0] in names))


def _trials(records: Sequence[TrialRecord], folder: Path) -> tuple[Path, ...]:
    known = {str(record.number) for record in records}
    return tuple(path for path in _folders(folder / "trials") if path.name.isdigit() and path.name not in known)


def abandoned(places: Sequence[Path]) -> list[Leftover]:
    """In these folders: workplaces of preflights that were killed, copies and deletions that were not completed."""
    inside = list(dict.fromkeys(path.absolute() for place in places for path in _folders(place)))
    workplaces = [path for path in inside if path.name.startswith(WORKPLACE) and not _is_in_use(path)]
    half_done = [path for path in inside if path.name.startswith(_HALF_DONE) and _is_stale(path)]
    return [
        Leftover(what="workplaces of checks that were killed", folders=tuple(workplaces)),
        Leftover(what="copies that were not completed", folders=tuple(half_done)),
    ]


def usual_places(studies: Path, roots: Sequence[Path] = ()) -> list[Path]:
    """Where a preflight may have worked: beside the caches, or where there is no folder for these yet, above them."""
    return [studies, Path(), *roots, Path(tempfile.gettempdir())]


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """While this process lives and is in here, the folder is not abandoned."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then nobody else can take it either
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _is_in_use(folder: Path) -> bool:
    """Also where one cannot tell, or where it is another user's."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(handle).st_uid != os.getuid()
    except OSError:
        return True
    finally:
        os.close(handle)


def _is_stale(folder: Path) -> bool:
    try:
        stat = folder.stat()
    except OSError:
        return False
    return stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _STALE_SECONDS


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []
