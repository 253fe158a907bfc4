"""What the confirmations prove: which config is the best, and the interval of its ratio over the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from autocompile.knob_table import KNOBS
from autocompile.search.blocks import DROPPED_BLOCKS, FEW_BLOCKS, Arm, Block
from autocompile.search.canonical import Key, is_eager, key, starting_point
from autocompile.search.history import History, Score
from autocompile.search.student import Interval, mean_interval
from autocompile.spec import Paired, Plan

ALPHA = 0.05  # of a wrong win or loss of the whole study
LEAST_WIN = 1.01
NEGLIGIBLE = 0.03  # the most a simpler config may be slower than one it cannot be told from


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The chosen arm against the reference; ``ratio`` is of the logarithms, None where there is no reference."""

    rival: Arm | None
    reference: Arm | None
    ratio: Interval | None


def judge(history: History) -> Judgement | None:
    """None while too few blocks are complete to know a spread."""
    arms = dict.fromkeys(arm for block in history.blocks for arm in block.arms)
    rivals, references = sides(history.spec.plan, [arm for arm in arms if not history.spoiled(arm[0])])
    judged = _levels(history, references)
    if not judged:
        fastest = _levels(history, rivals)
        alone = fastest and not references and not history.eager_ran
        return Judgement(rival=_chosen(history, fastest), reference=None, ratio=None) if alone else None
    reference = max(judged, key=lambda arm: judged[arm])
    if not rivals:
        return Judgement(rival=None, reference=reference, ratio=None)
    ratios = {arm: values for arm in rivals if len(values := log_ratios(history, arm, reference)) > 1}
    if not ratios:
        return None
    alpha = ALPHA / (len(ratios) + len(judged) - 1)  # the best of several was chosen on both sides
    intervals = {arm: mean_interval(values, alpha=alpha) for arm, values in ratios.items()}
    winners = {arm: interval.mean for arm, interval in intervals.items() if wins(interval)}
    # Simplicity counts among winners; without one it is the best compiled config that ties or loses.
    rival = _chosen(history, winners) if winners else max(intervals, key=lambda arm: intervals[arm].mean)
    return Judgement(rival=rival, reference=reference, ratio=intervals[rival])


def kept(history: History, arm: Arm) -> list[Score]:
    """This arm's scores in the blocks that count."""
    return [_score(history, block, arm) for block in _common(history, arm)]


def log_ratios(history: History, arm: Arm, other: Arm) -> list[float]:
    """ln(arm / other) of the objective in each block that counts."""
    return [
        math.log(_score(history, block, arm).objective / _score(history, block, other).objective)
        for block in _common(history, arm, other)
    ]


def wins(ratio: Interval) -> bool:
    return ratio.low > 0 and ratio.mean > math.log(LEAST_WIN)


def simplest(history: History, scores: Sequence[Score]) -> Score | None:
    """Of single measurements: the best, or one that is slower by a negligible part and departs from fewer defaults."""
    if not scores:
        return None
    limit = (1 - NEGLIGIBLE) * max(score.objective for score in scores)
    equal = [score for score in scores if score.objective >= limit]
    return min(equal, key=lambda score: (_departures(history, (score.key, 0)), -score.objective))


def sides(plan: Plan, arms: Sequence[Arm]) -> tuple[list[Arm], list[Arm]]:
    """Compiled configs and the eager ones they are compared with, or in a paired plan what it compares."""
    asked = plan.reference if isinstance(plan, Paired) else None
    first = (key(asked), 0) if asked is not None else None
    references = [arm for arm in arms if (arm == first if first else is_eager(dict(zip(KNOBS, arm[0], strict=True))))]
    return [arm for arm in arms if arm not in references], references


def _chosen(history: History, levels: dict[Arm, float]) -> Arm:
    """The best, or of those as good the one that departs from the fewest defaults."""
    best = max(levels, key=lambda arm: levels[arm])
    return min(
        (arm for arm in levels if arm == best or _as_good(history, arm, best)),
        key=lambda arm: (_departures(history, arm), -levels[arm]),
    )


def _as_good(history: History, arm: Arm, best: Arm) -> bool:
    """Whether the blocks show no difference, or less than what simplicity is worth."""
    lost = log_ratios(history, best, arm)
    if len(lost) < 2:
        return False
    interval = mean_interval(lost, alpha=ALPHA)
    return interval.low <= 0 and interval.mean < -math.log(1 - NEGLIGIBLE)


def _common(history: History, *arms: Arm) -> list[Block]:
    found = [block for block in history.blocks if all(arm in block.arms for arm in arms)]
    return found[DROPPED_BLOCKS:] if len(found) > FEW_BLOCKS else found


def _score(history: History, block: Block, arm: Arm) -> Score:
    return Score(history.objective(block.arms[arm]), block.arms[arm])


def _levels(history: History, arms: Sequence[Arm]) -> dict[Arm, float]:
    """The mean logarithm of each one's objective, where it ran in blocks enough to have a spread."""
    scores = {arm: kept(history, arm) for arm in arms}
    return {arm: fmean(math.log(run.objective) for run in runs) for arm, runs in scores.items() if len(runs) > 1}


def _departures(history: History, arm: Arm) -> int:
    defaults: Key = key(starting_point(history.spec, history.facts))
    return sum(value != default for value, default in zip(arm[0], defaults, strict=True))
