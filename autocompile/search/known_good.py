"""What is measured before a sampler is asked: eager training, settings that usually win, and their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from autocompile.knob_table import KNOBS
from autocompile.records import FailureKind, State, TrialRecord
from autocompile.search.canonical import (
    canonical,
    compiled_scopes,
    in_space,
    is_eager,
    key,
    known_to_fail,
    ladder,
    micro_batch,
    paddings,
    settings,
    starting_point,
    ways_to_train,
    without_compile,
)
from autocompile.search.history import History, tight_memory
from autocompile.search.lessons import reason_against
from autocompile.search.treatment import is_over
from autocompile.space import Config, default_config
from autocompile.spec import Facts, StudySpec, traits

_GAIN = 1.02  # a doubled micro-batch that brings less is the end of the climb: the device is full of work
_OUT_OF_MEMORY = (FailureKind.OOM, FailureKind.HOST_OOM)


def baselines(spec: StudySpec, facts: Facts) -> list[Config]:
    """Eager at the default micro-batch, and what to try in turn while memory does not suffice."""
    start = without_compile(starting_point(spec, facts))
    checkpointed = {**start, "gradient_checkpointing": True}
    starts = [start, *([checkpointed] if checkpointed != start and in_space(spec, facts, checkpointed) else [])]
    others = [way for way in ways_to_train(spec, facts) if way not in (start["parallel"], "none")]
    starts += [{**config, "parallel": way} for way in others for config in starts]
    return [
        {**config, "micro_batch": size}
        for config in starts
        for size in reversed(ladder(spec, facts, config))
        if size <= micro_batch(config)
    ]


def base(history: History) -> Config:
    """The eager config all others start from: the first baseline that was measured, else the least demanding one."""
    ordered = baselines(history.spec, history.facts)
    done = [config for config in ordered if _completed(history.trials.get(key(config), []))]
    return done[0] if done else ordered[-1]


def plain_compile(history: History) -> Config | None:
    """What most people write, `torch.compile(model)`, on the baseline's batch; None where the user pinned the scope."""
    if "scope" in settings(history.spec, history.facts):
        return None
    kept = {name: value for name, value in base(history).items() if not KNOBS[name].compiles}
    config = canonical({**kept, "scope": "model"})
    return None if known_to_fail(config) else config


def first_compiled(history: History) -> list[Config]:
    """Per-layer compile in the default mode and with CUDA graphs, or the space's first scope where it has no layers."""
    config = _default_compiled(history)
    if config is None:
        return []
    graphs = {**config, "mode": "reduce-overhead"}
    on_gpu = history.facts.devices[0].type == "cuda"
    return [
        choice
        for choice in ([config, graphs] if on_gpu and config["mode"] != graphs["mode"] else [config])
        if in_space(history.spec, history.facts, choice)
    ]


def owed(history: History) -> list[Config]:
    """What no verdict is fair without: what the user runs today, settings that usually win, eager training with the
    best config's batch, and both trained in each way that the study compares."""
    ways = ways_to_train(history.spec, history.facts)
    today = [canonical(history.spec.against)] if history.spec.against else []
    usual = [*today, *first_compiled(history), *(_with_each(history, "parallel", ways) if len(ways) > 1 else [])]
    best = next((score.config for score in history.searched if not score.eager), None)
    sizes = {micro_batch(score.config) for score in history.searched if score.eager}
    return usual if best is None or micro_batch(best) in sizes else [*usual, without_compile(best)]


def unmeasured(history: History) -> list[Config]:
    """Of these, what nothing speaks against and nobody measured: neither time nor trials were left for it."""

    def is_unknown(config: Config) -> bool:
        attempts = history.trials.get(key(config), [])
        return not is_over(attempts) if attempts else reason_against(history.lessons, config) is None

    confirmed = {score.key for score in history.confirmed}
    asked = [config for config in owed(history) if known_to_fail(config) is None and key(config) not in confirmed]
    return list(filter(is_unknown, asked))


def climbs(history: History) -> list[Config]:
    """The next micro-batches to measure, of the better known-good config and of eager, smaller ones first."""
    usual = [config for config in first_compiled(history) if known_to_fail(config) is None]
    started = [config for config in usual if key(config) in history.trials]
    starts = [base(history)]
    if started and all(is_over(history.trials[key(config)]) for config in started):
        starts = [max(started, key=lambda config: history.values.get(key(config), 0.0)), *starts]
    found = [step for start in starts if (step := _next_micro_batch(history, start)) is not None]
    return sorted(found, key=lambda config: (micro_batch(config), is_eager(config)))


def with_each_padding(history: History) -> list[Config]:
    """The better known-good config and eager training with every padding: which suits one need not suit the other."""
    return _with_each(history, "padding", paddings(history.spec, history.facts))


def _with_each(history: History, knob: str, values: Sequence[str]) -> list[Config]:
    started = [config for config in first_compiled(history) if key(config) in history.values]
    best = max(started, key=lambda config: history.values[key(config)], default=None)
    found = [{**config, knob: value} for value in values for config in ([best] if best else []) + [base(history)]]
    return [config for config in found if in_space(history.spec, history.facts, config)]


def _default_compiled(history: History) -> Config | None:
    spec, facts = history.spec, history.facts
    scopes = compiled_scopes(spec, facts)
    if not scopes:
        return None
    pinned = {**settings(spec, facts), "scope": "layer" if "layer" in scopes else scopes[0]}
    usual = default_config(spec.space, traits(spec, facts), pinned)
    like_base = {name: value for name, value in base(history).items() if not KNOBS[name].compiles and name != "scope"}
    config = canonical({**usual, **like_base})
    plain = {**config, "mode": "default"}
    return plain if in_space(spec, facts, plain) else config


def _next_micro_batch(history: History, start: Config) -> Config | None:
    """Upwards while it gains; downwards only where the first step up did not, or memory did not hold the start."""
    sizes = ladder(history.spec, history.facts, start)
    at = sizes.index(micro_batch(start))
    for path in (sizes[at:], sizes[at::-1]):
        gained, step = _walk(history, [{**start, "micro_batch": size} for size in path])
        if step is not None or gained:
            return step
    return None


def _walk(history: History, path: Sequence[Config]) -> tuple[bool, Config | None]:
    """Whether there is no need to walk the other way, and the first config of the path not tried yet."""
    best = 0.0
    for index, config in enumerate(path):
        attempts = history.trials.get(key(config), [])
        if not attempts:
            hopeless = reason_against(history.lessons, config) or known_to_fail(config)
            return index > 1, None if hopeless else config
        if not is_over(attempts):
            return True, None
        value = history.values.get(key(config))
        if value is None and best == 0.0 and _descends(path) and _memory_ended(history, attempts):
            continue
        if value is None or value < best * _GAIN:
            return index > 1, None
        if best == 0.0 and index > 0:
            return True, None  # the largest that fits
        best = value
    return len(path) > 1 and best > 0.0, None


def _descends(path: Sequence[Config]) -> bool:
    return len(path) > 1 and micro_batch(path[1]) < micro_batch(path[0])


def _completed(attempts: Sequence[TrialRecord]) -> bool:
    return bool(attempts) and attempts[-1].state is State.COMPLETE


def _memory_ended(history: History, attempts: Sequence[TrialRecord]) -> bool:
    last = attempts[-1]
    if last.measurement:
        return tight_memory(history.spec, history.facts, last.measurement)
    return last.failure is not None and last.failure.kind in _OUT_OF_MEMORY
