"""What a study looks like while it runs: a live view on a terminal, plain lines elsewhere; all of it on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autocompile.records import Progress, State, TrialRecord
from autocompile.report.study import measured
from autocompile.report.words import duration, ended, rate, short
from autocompile.tuner import Event, Tick, TrialEnded, TrialStarted

_N_OUTCOMES = 8
_REDRAWS_PER_SECOND = 4
_BAR_WIDTH = 40


@dataclass(frozen=True, kw_only=True)
class Running:
    """A slot's trial, and how much of the budget was used when it started."""

    trial: TrialStarted
    since_seconds: float


@dataclass(frozen=True, kw_only=True)
class View:
    """All that the live view shows, but for the stage of each running slice."""

    total_seconds: float | None
    used_seconds: float = 0.0
    running: Mapping[int, Running] = field(default_factory=dict)
    ended: tuple[TrialRecord, ...] = ()


def advance(view: View, event: Event) -> View:
    """The view after this event."""
    match event:
        case Tick(seconds_used=seconds):
            return replace(view, used_seconds=seconds)
        case TrialStarted(slot=slot):
            started = Running(trial=event, since_seconds=view.used_seconds)
            return replace(view, running={**view.running, slot: started})
        case TrialEnded(record=record):
            left = {slot: found for slot, found in view.running.items() if found.trial.number != record.number}
            return replace(view, running=left, ended=(*view.ended, record))


def render(view: View, stages: Mapping[int, str]) -> RenderableType:
    """The view as rich shows it; ``stages`` by slot."""
    table = Table.grid(padding=(0, 2))
    for slot, found in sorted(view.running.items()):
        elapsed = duration(max(0.0, view.used_seconds - found.since_seconds))
        stage = Text(f"{stages.get(slot, 'starting')}, {elapsed}", style="cyan")
        trial = found.trial
        table.add_row(f"slot {slot}", f"trial {trial.number} {trial.role}", Text(short(trial.config)), stage)
    lines = [
        Text(ended(record), style=_style(record), no_wrap=True, overflow="ellipsis")
        for record in view.ended[-_N_OUTCOMES:]
    ]
    return Group(_bar(view), Text(best_line(view.ended), style="bold"), table, *lines)


def best_line(records: tuple[TrialRecord, ...]) -> str:
    """Best so far against the best eager run."""
    found = measured(records)
    if not found:
        return "nothing measured yet"
    best = max(found, key=lambda run: run[1].tokens_per_second)
    eager = [measurement.tokens_per_second for record, measurement in found if record.config["scope"] == "none"]
    text = f"best so far: {short(best[0].config)}, {rate(best[1].tokens_per_second)} {best[1].unit}/s"
    return f"{text}, {best[1].tokens_per_second / max(eager):.2f}x eager" if eager else text


@contextmanager
def watching(console: Console, total_seconds: float | None) -> Iterator[Callable[[Event], None]]:
    """What `tune` is given to call with each event; the console is put in order at the end, whatever happens."""
    if console.is_terminal:
        screen = _Screen(console, total_seconds)
        with screen.live:
            yield screen.show
    else:
        yield lambda event: _print(console, event)


class _Screen:
    """The live display, opened and closed by ``watching``."""

    def __init__(self, console: Console, total_seconds: float | None) -> None:
        self.view = View(total_seconds=total_seconds)
        self.live = Live(console=console, refresh_per_second=_REDRAWS_PER_SECOND, get_renderable=self._draw)

    def show(self, event: Event) -> None:
        self.view = advance(self.view, event)

    def _draw(self) -> RenderableType:
        view = self.view  # the drawing thread sees one view, whatever the study does meanwhile
        return render(view, {slot: _stage(found.trial.folder) for slot, found in view.running.items()})


def _stage(folder: Path) -> str:
    """From the slice's own progress file; it is not there before the slice has started."""
    try:
        found = Progress.model_validate_json((folder / "progress.json").read_text())
    except (OSError, ValidationError):
        return "starting"
    return f"{found.stage}, step {found.step}" if found.step else str(found.stage)


def _print(console: Console, event: Event) -> None:
    match event:
        case TrialStarted():
            text = f"trial {event.number} {event.role} {short(event.config)}: started"
        case TrialEnded(record=record):
            text = ended(record)
        case Tick():
            return
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bar(view: View) -> RenderableType:
    if view.total_seconds is None:
        return Text(f"{duration(view.used_seconds)} used, no limit")
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        "budget",
        ProgressBar(total=view.total_seconds, completed=min(view.used_seconds, view.total_seconds), width=_BAR_WIDTH),
        f"{duration(view.used_seconds)} of {duration(view.total_seconds)}",
    )
    return bar


def _style(record: TrialRecord) -> str:
    return "green" if record.state is State.COMPLETE else "yellow" if record.state is State.PRUNED else "red"
