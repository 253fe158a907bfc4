"""Where a study's slices work: their folders, one compile cache for each config, a CPU's seed of such caches."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from autocompile.failure_texts import CACHE_FOLDER, SPARE_CACHE_FOLDER
from autocompile.records import Answer, Failed
from autocompile.search import canonical
from autocompile.space import Config
from autocompile.spec import Facts, MeasureRequest, StudySpec
from autocompile.tuner.slices import machine_failure
from autocompile.values import digest


def trial_folder(study_folder: Path, number: int) -> Path:
    return study_folder / "trials" / str(number)


def cache_root(spec: StudySpec, study_folder: Path) -> Path:
    return Path(spec.cache_root) if spec.cache_root else study_folder / "cache"


def cache_folder(spec: StudySpec, facts: Facts, config: Config, *, study_folder: Path) -> Path:
    """One for each workload, config and environment: torch's own key leaves out what a config may change."""
    key = digest(
        {
            "workload": spec.workload.model_dump(mode="json"),
            "config": dict(canonical(config)),
            "environment": facts.environment,
        }
    )
    return cache_root(spec, study_folder).absolute() / key[:32]


def seed_folder(spec: StudySpec, folder_root: Path) -> Path:
    """What a CPU's cache folders start as, made by the preflight; all studies under one root share it."""
    return (Path(spec.cache_root) / "seed") if spec.cache_root else folder_root / ".seed"


def spare_root() -> Path:
    """Where compiled code goes while the usual place does not take it: nothing of a study, so anybody may empty it."""
    return Path(os.environ.get("TMPDIR") or "/tmp", f"autocompile-{os.getuid()}")


def spare_folder(cache: Path) -> Path:
    """The cache folder to use instead of this one."""
    return spare_root() / cache.name


def prepare(request: MeasureRequest, folder: Path, seed: Path | None) -> Failed | None:
    """Make a slice's folders, the cache a copy of the seed if one is given; a failure if the disk does not take it."""
    cache = Path(request.cache_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return machine_failure(f"cannot make the slice's folder: {error}")
    try:
        if cache.parent == spare_root():
            _make_private(cache.parent)
        if seed is not None:
            copy_seed(seed if seed.is_dir() else spare_folder(seed), cache)
    except OSError as error:
        reason = error.strerror or str(error)[:200]  # of a copy there may be one complaint for each file
        return machine_failure(f"cache folder {cache}: {reason}", subkind=CACHE_FOLDER)
    return None


def with_cache_named(answer: Answer, request: MeasureRequest) -> Answer:
    """A failure of the cache folder says of which one; when the spare one fails too nothing is left to try."""
    if not isinstance(answer, Failed) or answer.failure.subkind != CACHE_FOLDER:
        return answer
    cache, failure = Path(request.cache_folder), answer.failure
    named = failure.message if str(cache) in failure.message else f"{failure.message} (cache folder {cache})"
    subkind = SPARE_CACHE_FOLDER if cache.parent == spare_root() else CACHE_FOLDER
    return answer.model_copy(update={"failure": failure.model_copy(update={"message": named, "subkind": subkind})})


def _make_private(folder: Path) -> None:
    """Whoever can write there can have us run their code."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))


def copy_seed(seed: Path, folder: Path) -> None:
    """Make ``folder`` a copy of the seed, complete or not at all. Nothing where there is one, or no seed."""
    if folder.exists() or not seed.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = tempfile.mkdtemp(dir=folder.parent, prefix=".autocompile_copy.")
    try:
        shutil.copytree(seed, aside, dirs_exist_ok=True)
        with suppress(FileExistsError, OSError):  # another study was faster
            os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
