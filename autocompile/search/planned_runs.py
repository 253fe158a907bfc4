"""The best config for runs of several lengths: seconds of compile are charged, so a short run may prefer another."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from autocompile.records import PlannedRun
from autocompile.search.history import History, Score
from autocompile.search.judging import NEGLIGIBLE, kept

STEPS = (500, 5_000, 50_000)


def by_length(history: History, chosen: Score) -> tuple[PlannedRun, ...]:
    """For some numbers of optimizer steps as large as the chosen config's, and for the user's own planned run.

    Of everything that was measured, each by its confirmations where it has any.
    """
    scores = list({score.key: score for score in (*history.searched, *history.confirmed)}.values())
    per_step = _tokens_per_step(chosen)
    amounts = {steps: steps * per_step for steps in STEPS}
    if (own := history.spec.tokens_of_run(per_step)) is not None:
        amounts[max(1, round(own / per_step))] = own
    return tuple(_planned_run(history, scores, chosen, amounts[steps]) for steps in sorted(amounts))


def _planned_run(history: History, scores: Sequence[Score], chosen: Score, amount: float) -> PlannedRun:
    """The verdict's config stands unless another is quicker by more than a negligible part."""
    slowed = _slowed(history, chosen)
    seconds = {score.key: _seconds(history, score, amount, slowed) for score in scores}
    best = min(scores, key=lambda score: seconds[score.key] * (1 - NEGLIGIBLE * (score.key == chosen.key)))
    eager = [seconds[score.key] for score in scores if score.eager]
    return PlannedRun(
        steps=max(1, round(amount / _tokens_per_step(chosen))),
        amount=round(amount),
        config=dict(best.config),
        seconds=seconds[best.key],
        eager_seconds=min(eager, default=None),
    )


def _tokens_per_step(score: Score) -> float:
    return score.measurement.tokens_per_second * score.measurement.step_seconds.median


def _seconds(history: History, score: Score, amount: float, slowed: float) -> float:
    """Compile included."""
    speeds = [run.measurement.tokens_per_second for run in kept(history, (score.key, 0))]
    speed = slowed * geometric_mean(speeds or [score.measurement.tokens_per_second])
    return history.cold_seconds[score.key] + amount / speed


def _slowed(history: History, chosen: Score) -> float:
    """What a hot GPU leaves of a short window's speed: known of the chosen config, taken for the others too."""
    speeds = [run.measurement.tokens_per_second for run in kept(history, (chosen.key, 0))]
    short = geometric_mean(speeds or [chosen.measurement.tokens_per_second])
    return (history.sustained_speed(chosen.key) or short) / short
