"""Keep a study's compile caches under a cap while it runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from autocompile.executors import Executor
from autocompile.files import delete_folder, size_of
from autocompile.records import Answer, Measured, TrialRecord
from autocompile.search import objective
from autocompile.search.canonical import is_eager
from autocompile.spec import Facts, MeasureRequest, SliceRequest, StudySpec
from autocompile.tuner.folders import cache_folder

_KEPT = 16  # of the fastest configs: several times as many as are ever confirmed


class CappedCaches:
    """Runs slices with another executor, and before each evicts caches where those of the study exceed their cap.

    Evicted are those of configs that can no longer win, the longest unused first; never one that a slice is using.
    """

    def __init__(
        self, executor: Executor, spec: StudySpec, facts: Facts, *, folder: Path, records: Sequence[TrialRecord]
    ) -> None:
        self._executor = executor
        self._spec = spec
        self._lock = threading.Lock()
        self._in_use: Counter[Path] = Counter()
        self._bytes: dict[Path, int | None] = {}  # in the order of their last use; None until somebody has looked
        self._worth: dict[Path, float] = {}
        for record in sorted(records, key=lambda record: record.number):
            cache = cache_folder(spec, facts, record.config, study_folder=folder)
            self._used(cache, record.outcome, eager=is_eager(record.config))

    def run(self, request: SliceRequest, folder: Path) -> Answer:
        if not isinstance(request, MeasureRequest):
            return self._executor.run(request, folder)
        cache, answer = Path(request.cache_folder), None
        with self._lock:
            self._in_use[cache] += 1
            self._evict()
        try:
            answer = self._executor.run(request, folder)
        finally:
            n_bytes = size_of(cache)
            with self._lock:
                self._in_use[cache] -= 1
                self._used(cache, answer, eager=is_eager(request.config), n_bytes=n_bytes)
        return answer

    def _used(self, cache: Path, answer: object, *, eager: bool, n_bytes: int | None = None) -> None:
        self._bytes.pop(cache, None)
        self._bytes[cache] = n_bytes
        found = objective(self._spec, answer.measurement) if isinstance(answer, Measured) and not eager else 0.0
        self._worth[cache] = max(found, self._worth.get(cache, 0.0))

    def _evict(self) -> None:
        for cache, n_bytes in self._bytes.items():
            if n_bytes is None:
                self._bytes[cache] = size_of(cache)
        sizes = {cache: n_bytes or 0 for cache, n_bytes in self._bytes.items()}
        in_use = [cache for cache, count in self._in_use.items() if count]
        for cache in evicted(sizes, self._worth, in_use=in_use, cap_bytes=self._spec.cache_bytes):
            delete_folder(cache)
            del self._bytes[cache], self._worth[cache]


def evicted(
    sizes: Mapping[Path, int], worth: Mapping[Path, float], *, in_use: Collection[Path], cap_bytes: int
) -> list[Path]:
    """The folders to delete so that the rest fits, given in the order of their last use.

    ``worth`` is the objective a config reached, 0 where it failed or compiles nothing: its cache is not needed again.
    """
    best = sorted((cache for cache in worth if worth[cache] > 0), key=lambda cache: -worth[cache])[:_KEPT]
    excess = sum(sizes.values()) - cap_bytes
    found: list[Path] = []
    for cache, n_bytes in sizes.items():
        if excess <= 0:
            break
        if cache not in best and cache not in in_use:
            found.append(cache)
            excess -= n_bytes
    return found
