"""Confirmations as randomised blocks: in each, every config in question runs once, in a process of its own.

The unit of replication is the process: two of one config differ by up to some percent, however exact the window of each
looks. So what is compared is the ratio of two configs within a block, and its spread over the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from autocompile.records import TrialRecord
from autocompile.search.canonical import Key, key
from autocompile.spec import Paired, Plan, Role

Arm: TypeAlias = tuple[Key, int]  # a config, and which of its equals: a paired plan may hold one twice

DROPPED_BLOCKS = 1  # the first still warms up: page cache, compile caches, the GPU
FEW_BLOCKS = 3  # so few are all kept: with a degree of freedom less their interval would be thrice as wide


@dataclass(frozen=True)
class Block:
    """Who ran in it, in that order. ``phase`` counts how often the search went on before it."""

    phase: int
    arms: dict[Arm, TrialRecord] = field(default_factory=dict)


def blocks(plan: Plan, records: Iterable[TrialRecord]) -> tuple[Block, ...]:
    """Of slices in the order they were started. A block ends where a config comes again, and where the search went on.

    The last one is empty where the search went on since. Of equal configs in a paired plan each is the first to run in
    turn, as others are by the order they are asked for.
    """
    copies = [key(config) for config in plan.configs] if isinstance(plan, Paired) else []
    found = [Block(phase=0)]
    for record in records:
        if record.role in (Role.BASELINE, Role.SEARCH):
            if found[-1].arms:
                found.append(Block(phase=found[-1].phase + 1))
            continue
        if record.role is not Role.CONFIRM:
            continue
        name = key(record.config)
        equals = range(max(1, copies.count(name)))
        if all((name, copy) in found[-1].arms for copy in equals):
            found.append(Block(phase=found[-1].phase))
        in_turn = equals if len(found) % 2 else reversed(equals)
        arm = next((name, copy) for copy in in_turn if (name, copy) not in found[-1].arms)
        found[-1].arms[arm] = record
    return tuple(found)
