"""What to do about what a trial showed: the knob or the line to change, and the command to try it."""

from __future__ import annotations

from autocompile.records import TrialRecord
from autocompile.report.advice.command import tune_command
from autocompile.report.advice.failures import FAILURES
from autocompile.report.advice.graphs import GRAPHS
from autocompile.report.advice.recompiles import RECOMPILES
from autocompile.report.advice.rule import Rule
from autocompile.report.advice.seen import Case
from autocompile.report.study import Study
from autocompile.space import Config
from autocompile.values import Value

__all__ = ["RULES", "Advice", "advice"]

RULES = (*RECOMPILES, *GRAPHS, *FAILURES)


class Advice(Value):
    """``what`` was seen, ``change`` names the knob or the line, ``command`` tries it where a knob of ours does it.

    Two pieces of advice with equal ``cause`` and ``subject`` say the same of two trials.
    """

    cause: str
    subject: str
    what: str
    change: str
    command: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.cause, self.subject


def advice(record: TrialRecord, study: Study) -> list[Advice]:
    """For one trial, the likeliest cause first; empty where nothing went wrong."""
    case = Case(record, study)
    return [_advice(rule, case, what) for rule in RULES for what in rule.seen(case)[: None if rule.each else 1]]


def _advice(rule: Rule, case: Case, what: str) -> Advice:
    frozen = case.study.facts.frozen_knobs
    changes = {
        name: value for name, value in rule.sets(case).items() if value != case.config[name] and name not in frozen
    }
    return Advice(
        cause=rule.cause,
        subject=what if rule.each else "",
        what=what,
        change=rule.change + (_tried(case, {**case.config, **changes}) if changes else ""),
        command=tune_command(case.study.spec, case.config, changes) if changes else None,
    )


def _tried(case: Case, config: Config) -> str:
    """Where the study itself holds the config that is advised."""
    trials = [record.number for record in case.others if record.measurement and record.config == config]
    return f"; trial {trials[0]} measured that" if trials else ""
