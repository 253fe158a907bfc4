"""The one number a study maximises: tokens per second, of steady training or of a planned run with its compile."""

from __future__ import annotations

from autocompile.records import Measurement


def objective(measurement: Measurement, planned_tokens: int | None) -> float:
    """Steady tokens per second; for a planned run the tokens over all its seconds, the cold compile included."""
    if planned_tokens is None:
        return measurement.tokens_per_second
    training_seconds = planned_tokens / measurement.tokens_per_second
    return planned_tokens / (measurement.compile.cold_seconds + training_seconds)
