"""The one number a study maximises: tokens per second, of steady training or of a planned run with its compile."""

from __future__ import annotations

from autocompile.records import Measurement
from autocompile.spec import StudySpec


def objective(
    spec: StudySpec, measurement: Measurement, *, full_depth: float | None = None, cold_seconds: float | None = None
) -> float:
    """Steady tokens per second; for a planned run the tokens over all its seconds, the cold compile included.

    ``full_depth`` is the speed at full depth, where the measurement itself was made at another one; ``cold_seconds``
    of compile is known from another slice, where this one found a warm cache.
    """
    speed = measurement.tokens_per_second if full_depth is None else full_depth
    if spec.planned_tokens is None and spec.planned_steps is None:
        return speed
    planned = spec.tokens_of_run(measurement.tokens_per_second * measurement.step_seconds.median)
    assert planned is not None
    cold = measurement.compile.cold_seconds if cold_seconds is None else cold_seconds
    return planned / (cold + planned / speed)
