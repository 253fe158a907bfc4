"""What follows from one record alone, found out once: the next question is about the same records and a few more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from autocompile.records import TrialRecord

T = TypeVar("T")


class PerRecord(Generic[T]):
    """A pure function of one record, with its answers by the record's number; of another one there it is asked anew."""

    def __init__(self, function: Callable[[TrialRecord], T]) -> None:
        self._function = function
        self._known: dict[int, tuple[TrialRecord, T]] = {}

    def of(self, records: Iterable[TrialRecord]) -> list[T]:
        return [self._answer(record) for record in records]

    def _answer(self, record: TrialRecord) -> T:
        known = self._known.get(record.number)
        if known is None or known[0] is not record:
            known = self._known[record.number] = record, self._function(record)
        return known[1]
