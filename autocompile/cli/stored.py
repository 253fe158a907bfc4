"""Read a study from its database, with everything that is derived from it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from autocompile.errors import UserError

if TYPE_CHECKING:
    from autocompile.report import Study
    from autocompile.storage import Storage


def open_existing(url: str) -> Storage:
    """The storage, which reading does not create."""
    from autocompile.storage import Storage, exists

    if not exists(url):
        raise UserError(f"{url}: there are no studies yet; `autocompile tune` makes the first")
    return Storage.open(url)


def read_study(name: str, url: str) -> Study:
    with open_existing(url) as storage:
        return load_study(storage, name)


def load_study(storage: Storage, name: str) -> Study:
    """The stored study; UserError with the nearest names where there is none."""
    from autocompile.report import Study
    from autocompile.search import brake_reason, derived, verdict
    from autocompile.values import nearest

    stored = storage.load(name)
    if stored is None:
        known = storage.names()
        raise UserError(f'no study "{name}"; {nearest(name, known) if known else "there are none yet"}')
    records = storage.records(name)
    return Study(
        name=name,
        spec=stored.spec,
        facts=stored.facts,
        records=records,
        derived=derived(stored.spec, stored.facts, records),
        verdict=verdict(stored.spec, stored.facts, records),
        brake=brake_reason(records),
        used_seconds=stored.used_seconds,
        total_seconds=stored.spec.budget.seconds,
    )


def print_document(study: Study) -> None:
    """The study as one JSON document on stdout."""
    from autocompile.report.document import document, places_here

    print(json.dumps(document(study, places_here(study.spec.workload.script)), indent=2))
