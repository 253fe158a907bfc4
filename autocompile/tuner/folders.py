"""Where a study's slices work: their folders, one compile cache for each config, a CPU's seed of such caches."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from autocompile.records import Failed
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


def prepare(request: MeasureRequest, folder: Path, seed: Path | None) -> Failed | None:
    """Make a slice's folders, the cache a copy of the seed if one is given; a failure if the disk does not take it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if seed is not None:
            copy_seed(seed, Path(request.cache_folder))
    except OSError as error:
        return machine_failure(f"cannot prepare the slice's folders: {error}")
    return None


def copy_seed(seed: Path, folder: Path) -> None:
    """Make ``folder`` a copy of the seed, complete or not at all. Nothing where there is one, or no seed."""
    if folder.exists() or not seed.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = tempfile.mkdtemp(dir=folder.parent, prefix=".copy.")
    try:
        shutil.copytree(seed, aside, dirs_exist_ok=True)
        with suppress(FileExistsError, OSError):  # another study was faster
            os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
