"""What failures teach: which configs need not run because a slice has shown how they would end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autocompile.failure_texts import CUDAGRAPH_LIVENESS, GPU_TOO_OLD
from autocompile.knob_table import KNOBS, materialises_mask, records_cuda_graphs
from autocompile.records import FailureKind, State, TrialRecord
from autocompile.search.canonical import is_eager, known_to_fail, micro_batch
from autocompile.search.cost import compile_weight
from autocompile.space import Config
from autocompile.spec import FULL_DEPTH

_Group: TypeAlias = tuple[object, ...]

# These depend on size or time, not on the pair that is known to fail.
_SAY_NOTHING_OF_A_PAIR = (FailureKind.OOM, FailureKind.HOST_OOM, FailureKind.COMPILE_TIMEOUT)


@dataclass(frozen=True)
class _Rule:
    """A failure covers the configs of its group, from its own level up; no group, no lesson."""

    group: Callable[[Config], _Group | None]
    level: Callable[[Config], float]
    reason: str


@dataclass(frozen=True)
class Lessons:
    """The least level that failed in each group with the record that did, and the pairs that failed."""

    failed: dict[tuple[str, _Group], tuple[float, TrialRecord]]
    pairs: dict[str, TrialRecord]


def lessons(records: Sequence[TrialRecord]) -> Lessons:
    """Learn from failures of configs at full depth; a slice that was stopped, or a broken machine, proves nothing."""
    failed: dict[tuple[str, _Group], tuple[float, TrialRecord]] = {}
    pairs: dict[str, TrialRecord] = {}
    for record in records:
        if record.state is not State.PRUNED or record.stopped or record.fidelity != FULL_DEPTH:
            continue
        if (failure := record.failure) is None:
            continue
        pair = known_to_fail(record.config)
        if pair and failure.kind not in _SAY_NOTHING_OF_A_PAIR:
            pairs.setdefault(pair, record)
        name = failure.subkind if failure.subkind in _RULES else failure.kind
        rule = _RULES.get(name)
        if rule is None or (group := rule.group(record.config)) is None:
            continue
        level = rule.level(record.config)
        known = failed.get((name, group))
        if known is None or level < known[0]:
            failed[name, group] = (level, record)
    return Lessons(failed, pairs)


def reason_against(learned: Lessons, config: Config) -> str | None:
    """Why this config need not run; None if nothing speaks against it."""
    if learned.pairs and (pair := known_to_fail(config)) in learned.pairs:
        return f"{pair} failed in trial {learned.pairs[pair].number}"
    if not learned.failed:
        return None
    for name, rule in _RULES.items():
        group = rule.group(config)
        found = learned.failed.get((name, group)) if group is not None else None
        if found and rule.level(config) >= found[0]:
            return rule.reason.format(trial=found[1].number, **found[1].config)
    return None


def _memory_group(config: Config) -> _Group:
    return tuple(config[name] for name, knob in KNOBS.items() if knob.memory and name != "micro_batch")


def _fullgraph_group(config: Config) -> _Group | None:
    return (config["scope"],) if config["fullgraph"] and not is_eager(config) else None


def _attention_group(config: Config) -> _Group:
    """A whole-model trace gives attention another mask. With no backend forced it is the compiler that cannot."""
    if config["sdpa"] == "auto":
        return "auto", config["scope"]
    return config["sdpa"], materialises_mask(config), config["padding"] == "packed"


def _compiled_group(config: Config) -> _Group | None:
    return None if is_eager(config) else (config["scope"],)


def _any_compiled(config: Config) -> _Group | None:
    return None if is_eager(config) else ()


def _graphs_group(config: Config) -> _Group | None:
    return (config["scope"],) if records_cuda_graphs(config) else None


def _guard_group(config: Config) -> _Group | None:
    return None if is_eager(config) else (config["scope"], config["dynamic"], config["padding"])


def _any_level(config: Config) -> float:
    return 0.0


# By kind, or by subkind where that proves something else.
_RULES: dict[str, _Rule] = {
    FailureKind.OOM: _Rule(
        _memory_group, micro_batch, "trial {trial} ran out of memory with these settings at micro-batch {micro_batch}"
    ),
    FailureKind.GRAPH_BREAK: _Rule(
        _fullgraph_group, _any_level, "scope {scope} has a graph break, which fullgraph refused in trial {trial}"
    ),
    FailureKind.BACKEND_UNSUPPORTED: _Rule(
        _attention_group, _any_level, "trial {trial} showed that sdpa {sdpa} is not supported here with scope {scope}"
    ),
    FailureKind.RECOMPILE_STORM: _Rule(
        _guard_group,
        lambda config: -float(config["cache_size_limit"]),
        "scope {scope} with dynamic {dynamic} recompiled beyond {cache_size_limit} in trial {trial}",
    ),
    FailureKind.COMPILE_TIMEOUT: _Rule(
        _compiled_group,
        compile_weight,
        "scope {scope} with the cheaper mode {mode} did not compile in time in trial {trial}",
    ),
    GPU_TOO_OLD: _Rule(_any_compiled, _any_level, "trial {trial} showed that this GPU is too old for the compiler"),
    CUDAGRAPH_LIVENESS: _Rule(
        _graphs_group, _any_level, "trial {trial} showed that scope {scope} keeps what a CUDA graph overwrites"
    ),
}
