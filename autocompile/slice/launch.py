"""Start the ranks of a slice with torch's elastic launcher, and come back with what each of them wrote."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autocompile.slice.merge import RankOutcome, is_cause

_LOOK_SECONDS = 0.1

log = logging.getLogger("autocompile.slice")


def launch(folder: Path, world_size: int) -> list[RankOutcome]:
    """The outcomes of these ranks, at least that of a cause; the launcher ends the others when one has failed.

    Where the cause is a rank that died without a word this process dies as that did, and whoever watches it reads
    exit status and log as ever.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
    )
    for number in range(world_size):
        rank_file(folder, number).unlink(missing_ok=True)
    failures: Iterable[ProcessFailure] = ()
    try:
        elastic_launch(config, sys.executable)("-m", "autocompile.slice.rank", str(folder))
    except ChildFailedError as error:
        failures = error.failures.values()
    written = [rank_file(folder, number) for number in range(world_size)]
    outcomes = [RankOutcome.model_validate_json(path.read_bytes()) for path in written if path.exists()]
    if len(outcomes) < world_size and not any(map(is_cause, outcomes)):
        _die_as(failures, outcomes)
    return outcomes


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _die_as(failures: Iterable[ProcessFailure], outcomes: Sequence[RankOutcome]) -> NoReturn:
    """As the first rank that left no outcome; the launcher itself ended those that it sent SIGTERM."""
    told = {outcome.rank for outcome in outcomes}
    silent = [failure for failure in failures if failure.local_rank not in told]
    first = min(silent, key=lambda failure: (failure.exitcode == -signal.SIGTERM, failure.timestamp), default=None)
    status = 1 if first is None else first.exitcode
    log.error("a rank ended with status %d and said nothing", status)
    sys.stderr.flush()
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status > 0 else 1)
