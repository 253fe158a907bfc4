"""The next confirmation: who takes part, in which order, and when enough is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from autocompile.search.affordability import FEWEST_BLOCKS, LEAST_ROUNDS, Means
from autocompile.search.blocks import DROPPED_BLOCKS, Arm
from autocompile.search.canonical import key
from autocompile.search.finalists import lineup
from autocompile.search.history import History
from autocompile.search.judging import judge
from autocompile.space import Config
from autocompile.spec import Paired

MOST_ROUNDS = 12
_HALF_WIDTH = 0.015  # of the logarithm of the ratio: no more blocks are needed
_PAIR = 2  # the best and its reference, without which there is no verdict


def next_confirmation(means: Means) -> Config | None:
    """The first block takes in whoever the time left can confirm often enough, the others repeat it in other orders."""
    history = means.history
    members = _members(history)
    if (joins := _joins(means, list(members.values()))) is not None:
        return joins
    if len(members) < _PAIR or is_settled(history):
        return None
    return _in_turn(means, list(members.values()))


def is_settled(history: History) -> bool:
    """Enough blocks for the interval that is wanted, or as many as are worth their time."""
    each = (sum(arm in block.arms for block in history.phase) for arm in _members(history))
    rounds = min(each, default=0) - DROPPED_BLOCKS
    if rounds < LEAST_ROUNDS:
        return False
    judged = judge(history)
    known = judged is not None and (judged.ratio is None or judged.ratio.half_width <= _HALF_WIDTH)
    return known or rounds >= MOST_ROUNDS


def _joins(means: Means, members: Sequence[Config]) -> Config | None:
    """Who comes next in the first block: the pair without which there is no verdict, what the user runs today, then
    whom the time allows beside the winner's sustained minute.

    Later only who takes the place of one of the pair that failed. A paired plan hears all its configs once.
    """
    history = means.history
    asked = lineup(history)
    waiting = _less(asked if len(history.phase) < 2 else asked[:_PAIR], members)
    if not waiting:
        return None
    if isinstance(history.spec.plan, Paired):
        return waiting[0] if means.affords(waiting[:1]) else None
    together = [*members, *waiting][: max(_PAIR, len(members) + 1)]
    more = len(members) >= _PAIR
    today = history.spec.against is not None and key(waiting[0]) == key(history.spec.against)
    rounds = LEAST_ROUNDS if more and not today else FEWEST_BLOCKS - 1
    coming = [*together[len(members) :], *(rounds * together)]
    return waiting[0] if means.affords(coming, keep_sustained=more) else None


def _in_turn(means: Means, members: Sequence[Config]) -> Config | None:
    """The next of a block that was begun, or the first of a new one if all of it fits."""
    phase, seed = means.history.phase, means.history.spec.seed
    begun = _less(_ordered(members, seed, len(phase) - 1), [record.config for record in phase[-1].arms.values()])
    turn = begun or _ordered(members, seed, len(phase))
    enough = len(phase) - DROPPED_BLOCKS >= LEAST_ROUNDS  # so the winner's sustained minute comes first
    return turn[0] if means.affords(turn, keep_sustained=enough and not begun) else None


def _members(history: History) -> dict[Arm, Config]:
    """Those of the phase's blocks, less whoever failed since."""
    arms = {arm: record.config for block in history.phase for arm, record in block.arms.items()}
    return {arm: config for arm, config in arms.items() if not history.spoiled(arm[0])}


def _ordered(members: Sequence[Config], seed: int, index: int) -> list[Config]:
    """At random, and every second block backwards: what coming first does to a slice cancels over two."""
    order = random.Random(f"{seed} {(index + 1) // 2}").sample(list(members), k=len(members))
    return order if index % 2 else order[::-1]


def _less(configs: Sequence[Config], others: Sequence[Config]) -> list[Config]:
    """Without the others, each of which takes away one that trains the same way."""
    taken = Counter(map(key, others))
    left = []
    for config in configs:
        if taken[key(config)] > 0:
            taken[key(config)] -= 1
        else:
            left.append(config)
    return left
