"""The verdict in one sentence, with nothing in it that was not measured."""

from __future__ import annotations

from autocompile.records import Result, Verdict
from autocompile.report.strategies import in_words
from autocompile.report.study import Row, Study, row, runs_of, spread
from autocompile.report.words import duration, gib, rate, short, tokens
from autocompile.space import Config
from autocompile.spec import Paired

ALLOWANCE = "from single runs: their own spread, and 10 % between processes"
NOTABLE_SPREAD = 0.15
UNDECIDED_RATIO = 1.2  # between the ends of an interval that says nothing of use
UNDECIDED_SINGLE_RATIO = 1.5  # of single runs, whose allowance alone is 1.2
PROVISIONAL = "provisional: the budget did not hold the confirming runs"


def sentence(study: Study) -> str:
    """What the study says about compile for this training, worst news included."""
    verdict = study.verdict
    best = row(verdict.config, study.records) if verdict.config is not None else None
    first = reference(study)
    if verdict.result is Result.NONE:
        return "nothing was measured, so there is no verdict"
    if first is not None:
        parts = [_against(verdict, first)]
    elif verdict.result is Result.WIN:
        parts = _win(study, best)
    elif verdict.result is Result.LOSS:
        parts = [f"compile is slower here: {_ratio(verdict)} eager's speed, so leave it off", *_eager(study, best)]
    else:
        parts = [_tie(study), *_eager(study, best)]
    sure = verdict.confirmed or _none_ran(study)
    ways = in_words(study)
    return "; ".join(
        [
            *parts,
            *_today(study),
            *([ways] if ways else []),
            *_unmeasured(verdict),
            *_unsteady(study),
            *([] if sure else [PROVISIONAL]),
        ]
    )


def _today(study: Study) -> list[str]:
    """What the user runs now, where the study was asked to beat it."""
    today, ratio = study.spec.against, study.verdict.speedup_over_against
    if today is None:
        return []
    name = f"what you run today ({short(today)})"
    if ratio is None:
        return [f"{name} could not be compared"]
    return [f"it is {name}" if ratio == 1.0 else f"{ratio:.2f}x the speed of {name}"]


def _unmeasured(verdict: Verdict) -> list[str]:
    """A verdict holds for what was measured, so what might change it is named."""
    return [f"not measured: {', '.join(map(short, verdict.unmeasured))}"] if verdict.unmeasured else []


def _against(verdict: Verdict, first: Config) -> str:
    """Two or more configs that are all compiled, or all eager."""
    if verdict.speedup_vs_best_eager is None:
        return f"nothing could be compared with {short(first)}"
    word = {Result.WIN: "faster", Result.LOSS: "slower"}.get(verdict.result, "no difference beyond the noise")
    return f"{verdict.speedup_vs_best_eager:.3f}x the speed of {short(first)}: {word}"


def reference(study: Study) -> Config | None:
    """What others are compared with where it is not eager training; else None."""
    plan = study.spec.plan
    return plan.reference if isinstance(plan, Paired) else None


def _unsteady(study: Study) -> list[str]:
    """On a quiet machine runs of one config differ by a few percent, so several times as much must be spoken of."""
    found = spread(study)
    if found <= NOTABLE_SPREAD:
        return []
    return [f"beware: step times of one config varied by {found:.0%}, so measure again on a quiet machine"]


def interval(study: Study) -> str | None:
    """The interval of the ratio and what it stands on; None where there is none."""
    verdict, first = study.verdict, reference(study)
    if verdict.speedup_low is None or verdict.speedup_high is None:
        return None
    basis = f"95 % interval from {verdict.rounds} paired runs in fresh processes" if verdict.confirmed else ALLOWANCE
    than = "the best eager config" if first is None else short(first)
    return f"between {verdict.speedup_low:.3f}x and {verdict.speedup_high:.3f}x of {than} ({basis})"


def _win(study: Study, best: Row | None) -> list[str]:
    verdict = study.verdict
    against_best, against_same = verdict.speedup_vs_best_eager, verdict.speedup
    if against_best is None:
        parts = ["compile runs where no eager config could be measured"]
    elif against_same is None and verdict.unmeasured:
        parts = [f"{against_best:.2f}x faster than the best eager config that was measured"]
    elif against_same is None or abs(against_same / against_best - 1) < 0.01:
        parts = [f"{against_best:.2f}x faster than eager"]
    else:
        parts = [f"{against_best:.2f}x faster than the best eager config ({against_same:.2f}x with the same settings)"]
    if best is None:
        return parts
    return [*parts, *_compile(verdict, best), *_memory(study, best), *_planned(study, best)]


def _compile(verdict: Verdict, best: Row) -> list[str]:
    if verdict.break_even_steps is None:
        return [f"{duration(best.compile_seconds)} of compile"]
    return [f"{duration(best.compile_seconds)} of compile paid back after {verdict.break_even_steps} steps"]


def _memory(study: Study, best: Row) -> list[str]:
    if best.peak_memory_bytes is None:
        return []
    return [f"peak {gib(best.peak_memory_bytes)} of {gib(study.facts.devices[0].memory_bytes)} GiB"]


def _planned(study: Study, best: Row) -> list[str]:
    """With a planned run the verdict's ratios are of the whole run, compile included."""
    planned, ratio = _planned_tokens(study, best), study.verdict.speedup_vs_best_eager
    if planned is None:
        return []
    seconds = best.compile_seconds + planned / best.tokens_per_second
    run = f"your {tokens(planned)} {best.unit}: {duration(seconds)}"
    return [f"{run} instead of {duration(seconds * ratio)}" if ratio is not None else run]


def _planned_tokens(study: Study, best: Row) -> int | None:
    _, measurement = runs_of(best.config, study.records)[0]
    return study.spec.tokens_of_run(measurement.tokens_per_second * measurement.step_seconds.median)


def _none_ran(study: Study) -> bool:
    """Whether compiled configs were tried and all of them failed."""
    tried = [record for record in study.records if record.config["scope"] != "none" and record.outcome is not None]
    return bool(tried) and all(record.measurement is None for record in tried)


def is_undecided(study: Study) -> bool:
    """A tie in name alone: nothing compiled was compared with eager, or the interval says nothing of use."""
    verdict = study.verdict
    low, high = verdict.speedup_low, verdict.speedup_high
    if verdict.result is not Result.TIE or reference(study) is not None:
        return False
    unknown = verdict.speedup_vs_best_eager is None
    limit = UNDECIDED_RATIO if verdict.confirmed else UNDECIDED_SINGLE_RATIO
    return unknown or bool(low and high and high > limit * low)


def _tie(study: Study) -> str:
    verdict = study.verdict
    if _none_ran(study):
        return "no compiled config ran through, so nothing is known of compile here"
    if verdict.speedup_vs_best_eager is None:
        return "no compiled config could be compared with eager, so nothing is known of compile here"
    if is_undecided(study):
        return (
            f"undecided: the best compiled config had {_ratio(verdict)} eager's speed, but runs differed too much to "
            "tell; measure again, longer or on a quieter machine"
        )
    return f"no difference beyond the noise: the best compiled config has {_ratio(verdict)} eager's speed, leave it off"


def _ratio(verdict: Verdict) -> str:
    ratio = verdict.speedup_vs_best_eager
    return "less than" if ratio is None else f"{ratio:.2f}x"


def _eager(study: Study, best: Row | None) -> list[str]:
    if best is None:
        return []
    planned = _planned_tokens(study, best)
    run = [f"your {tokens(planned)} {best.unit}: {duration(planned / best.tokens_per_second)}"] if planned else []
    return [f"eager has {rate(best.tokens_per_second)} {best.unit}/s", *_memory(study, best), *run]
