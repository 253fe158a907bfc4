"""What a second GPU brings to a study: ``python -m tests.bench.slots --gpus 0,1 [--budget 10m] [--model NAME] ...``.

The same study runs on the first GPU alone and then on both side by side, each time in an empty folder. Confirmations
run one at a time in either, so the rate is of what comes before them, and their step times should be equal.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import chdir
from dataclasses import dataclass, field
from statistics import median

from autocompile.api import opened
from autocompile.cli.tune import parse_gpus
from autocompile.machine import Driver, ask_driver
from autocompile.place import Place
from autocompile.records import State
from autocompile.report.words import short
from autocompile.settings import Settings, study_spec
from autocompile.spec import Role
from autocompile.tuner import Event, TrialEnded, TrialStarted


@dataclass
class Watch:
    """When the search began and last ended, its trials that count, and each confirmed config's step times."""

    began: float = 0.0
    ended: float = 0.0
    n_trials: int = 0
    steps: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialStarted):
            self.began = self.began or time.monotonic()
        if isinstance(event, TrialEnded) and event.record.state is not State.FAIL:
            record = event.record
            if record.role in (Role.BASELINE, Role.SEARCH):
                self.n_trials, self.ended = self.n_trials + 1, time.monotonic()
            elif record.role is Role.CONFIRM and record.measurement:
                self.steps.setdefault(short(record.config), []).append(record.measurement.step_seconds.median)

    def per_minute(self) -> float:
        return 60 * self.n_trials / (self.ended - self.began) if self.n_trials else 0.0


def study(settings: Settings, gpus: tuple[int, ...]) -> Watch:
    watch, spec = Watch(), study_spec(settings)
    with tempfile.TemporaryDirectory() as folder, chdir(folder), opened(spec, Place(gpus=gpus)) as ready:
        ready.run(watch)
    print(f"GPUs {', '.join(map(str, gpus))}: {watch.n_trials} trials, {watch.per_minute():.2f} a minute", flush=True)
    return watch


def show(one: Watch, two: Watch) -> None:
    if one.n_trials:
        print(f"trials a minute, two GPUs over one: {two.per_minute() / one.per_minute():.2f}")
    for name in (both := sorted(one.steps.keys() & two.steps.keys())):
        ratio = median(two.steps[name]) / median(one.steps[name])
        spreads = f"{spread(one.steps[name])} alone, {spread(two.steps[name])} side by side"
        print(f"confirmed step time of {name}, two over one: {ratio:.4f} (spread {spreads})")
    if not both:
        print("no config was confirmed in both studies: give a larger --budget, or pin knobs with --set")


def spread(steps: list[float]) -> str:
    return f"{100 * (max(steps) - min(steps)) / median(steps):.1f} % in {len(steps)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.slots")
    parser.add_argument("--gpus", type=parse_gpus, default=(0, 1), metavar="0,1")
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = vars(parser.parse_args())
    gpus, driver = chosen.pop("gpus"), ask_driver()
    n_gpus = len(driver.gpus) if isinstance(driver, Driver) else 0
    if min(len(gpus), n_gpus) < 2:
        raise SystemExit(f"two GPUs are needed: --gpus names {len(gpus)}, this machine has {n_gpus}")
    show(study(Settings(**chosen), gpus[:1]), study(Settings(**chosen), gpus[:2]))


if __name__ == "__main__":
    main()
