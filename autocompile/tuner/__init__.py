"""Run a study: find out what machine and workload are, open or resume, then measure what the search asks for."""

from __future__ import annotations

from autocompile.tuner.events import (
    Clock,
    Event,
    Interrupted,
    StudyResult,
    Tick,
    TrialEnded,
    TrialStarted,
    WallClock,
)
from autocompile.tuner.loop import tune
from autocompile.tuner.opening import open_study, preflight, study_name
from autocompile.tuner.signals import signals

__all__ = [
    "Clock",
    "Event",
    "Interrupted",
    "StudyResult",
    "Tick",
    "TrialEnded",
    "TrialStarted",
    "WallClock",
    "open_study",
    "preflight",
    "signals",
    "study_name",
    "tune",
]
