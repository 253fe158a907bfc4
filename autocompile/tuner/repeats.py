"""What a slice is asked to do otherwise, for what its config and the machine went through before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autocompile.records import TrialRecord
from autocompile.search import needs_spare_cache, treatment
from autocompile.search.canonical import key
from autocompile.spec import MeasureRequest
from autocompile.tuner.folders import spare_folder


def repeated(request: MeasureRequest, records: Sequence[TrialRecord], *, first_number: int) -> MeasureRequest:
    """The request with its config's treatment, in the spare cache if the usual one broke since ``first_number``.

    Numerics are a config's, not a process's, so once compared they need no second look.
    """
    name = key(request.config)
    attempts = [record for record in records if key(record.config) == name]
    found = treatment(attempts)
    cache = Path(request.cache_folder)
    if found.fresh_caches:
        cache = cache.with_name(f"{cache.name}-{found.fresh_caches}")
    if needs_spare_cache([record for record in records if record.number >= first_number]):
        cache = spare_folder(cache)
    compared = any(record.outcome and record.outcome.telemetry.numerics for record in attempts if record.measurement)
    return request.model_copy(
        update={
            "cache_folder": str(cache),
            "compile_threads": found.compile_threads,
            "numerics": request.numerics and not compared,
        }
    )
