"""Run a study from the machine's check to its report: what the command line and `autocompile.tune` have in common."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from autocompile.errors import MachineError, UserError
from autocompile.executors.local import LocalExecutor
from autocompile.place import STORAGE, STUDIES, Place
from autocompile.settings import Settings, study_spec
from autocompile.spec import Facts, StudySpec, resolved
from autocompile.storage import Storage, exists
from autocompile.tuner import Event, Interrupted, StudyResult, TrialEnded, WallClock, open_study, preflight, signals
from autocompile.tuner import tune as run_slices
from autocompile.tuner.caches import CappedCaches

log = logging.getLogger("autocompile")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A study that is about to run; made by ``opened``. ``began`` is when its budget began to count."""

    name: str
    spec: StudySpec
    facts: Facts
    folder: Path
    slots: tuple[tuple[int, ...], ...]
    storage: Storage
    executor: LocalExecutor
    stop: threading.Event
    began: float

    def _capped(self) -> CappedCaches:
        records = self.storage.records(self.name)
        return CappedCaches(self.executor, self.spec, self.facts, folder=self.folder, records=records)

    def run(self, watch: Callable[[Event], None]) -> StudyResult:
        """Measure until there is a verdict; whatever ends it, the study's files hold what is known."""
        return run_slices(
            self.spec,
            name=self.name,
            storage=self.storage,
            executor=self._capped(),
            folder=self.folder,
            slots=self.slots,
            stop=self.stop,
            watch=watch,
            began=self.began,
        )


@contextmanager
def opened(spec: StudySpec, place: Place) -> Iterator[Opened]:
    """Check machine and workload, then create or resume the study; nothing of it is written before the check passed."""
    began = WallClock().now()
    exists(place.storage)  # a storage that cannot be is refused at once
    if place.study is not None and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", place.study) is None:
        raise UserError(f'--study: expected letters, digits, ".", "_" and "-", found "{place.study}"')
    check_mask(place.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    stop = threading.Event()
    executor = LocalExecutor(place.python, stop)
    with signals(SimpleQueue[None](), stop) as caught:
        try:
            facts = preflight(spec, executor, folder_root=Path(STUDIES), devices=place.gpus)
        except MachineError as error:
            if caught:
                raise Interrupted(None, caught[0]) from error
            raise
    side_by_side = slots(facts, place.gpus, each=spec.workload.gpus_per_trial)
    spec = spec.model_copy(update={"workload": resolved(spec.workload, facts)})
    with Storage.open(place.storage) as storage:
        name = open_study(spec, name=place.study, storage=storage, facts=facts, folder_root=Path(STUDIES))
        yield Opened(
            name=name,
            spec=spec,
            facts=facts,
            folder=Path(STUDIES, name),
            slots=side_by_side,
            storage=storage,
            executor=executor,
            stop=stop,
            began=began,
        )


def slots(facts: Facts, gpus: Sequence[int], *, each: int = 1) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each slice that may run at the same time, ``each`` so many; one slice in all on a CPU.

    UserError where they differ, since one study compares configs on one kind of GPU, or are too few.
    """
    if facts.devices[0].type == "cpu":
        return ((),)
    indices = tuple(gpus or range(len(facts.devices)))
    if len({device.name for device in facts.devices}) > 1:
        names = ", ".join(f"{index}: {device.name}" for index, device in zip(indices, facts.devices, strict=False))
        raise UserError(f"--gpus: expected GPUs of one kind, found {names}; name those to use")
    if len(indices) < each:
        raise UserError(f"--gpus-per-trial {each}: expected at most the {len(indices)} that a trial can have here")
    return tuple(indices[start : start + each] for start in range(0, len(indices) - each + 1, each))


def check_mask(gpus: Sequence[int], mask: str | None) -> None:
    """UserError for an index beyond the GPUs that ``mask``, the user's CUDA_VISIBLE_DEVICES if set, leaves visible."""
    if mask is None:
        return
    n_visible = len([name for name in mask.split(",") if name.strip()])
    if hidden := [index for index in gpus if index >= n_visible]:
        raise UserError(f'--gpus: CUDA_VISIBLE_DEVICES="{mask}" leaves {n_visible} visible, found index {hidden[0]}')


def tune(
    *,
    study: str | None = None,
    storage: str = STORAGE,
    python: str = sys.executable,
    gpus: Sequence[int] = (),
    **settings: Any,
) -> StudyResult:
    """`autocompile tune` from Python: the other arguments are its flags, such as ``model="llama2-7b", budget="30m"``.

    ``set`` may be a mapping. Slices run in child processes as ever; progress goes to the logger `autocompile`.
    """
    words = settings.get("set", ())
    if isinstance(words, Mapping):
        settings["set"] = [f"{key}={value}" for key, value in words.items()]
    spec = study_spec(Settings(**settings))
    with opened(spec, Place(study=study, storage=storage, python=python, gpus=tuple(gpus))) as ready:
        return ready.run(_log)


def _log(event: Event) -> None:
    if isinstance(event, TrialEnded):
        from autocompile.report.words import ended

        log.info(ended(event.record))
