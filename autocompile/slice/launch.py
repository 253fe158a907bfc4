"""Start the ranks of a slice with torch's elastic launcher, and come back with what each of them wrote."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autocompile.records import Failed
from autocompile.slice.merge import RankOutcome, is_cause

_LOOK_SECONDS = 0.1

log = logging.getLogger("autocompile.slice")


def launch(folder: Path, world_size: int) -> list[RankOutcome]:
    """The outcomes of these ranks, at least that of a cause; the launcher ends the others when one has failed.

    Where the cause is a rank that died without a word this process dies as that did, and whoever watches it reads
    exit status and log as ever.
    """
    for number in range(world_size):
        rank_file(folder, number).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        failures = _failures(folder, world_size, logs)
    written = [rank_file(folder, number) for number in range(world_size)]
    outcomes = [RankOutcome.model_validate_json(path.read_bytes()) for path in written if path.exists()]
    told = {outcome.rank for outcome in outcomes}
    silent = [failure for failure in failures if failure.local_rank not in told]
    died = [failure for failure in silent if failure.exitcode != -signal.SIGTERM]  # the launcher's own way to end them
    explained = any(map(is_cause, outcomes)) or (not died and any(isinstance(one.outcome, Failed) for one in outcomes))
    if len(outcomes) < world_size and not explained:
        _die_as(died or silent)
    return outcomes


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _failures(folder: Path, world_size: int, logs: str) -> Sequence[ProcessFailure]:
    """Of the ranks, once all have ended; what torch makes a folder of logs for goes to ours."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
        local_addr="127.0.0.1",  # a host may not find its own name
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "autocompile.slice.rank", str(folder))
    except ChildFailedError as error:
        return list(error.failures.values())
    return []


def _die_as(failures: Sequence[ProcessFailure]) -> NoReturn:
    """As the first of these ranks, which left no outcome."""
    first = min(failures, key=lambda failure: failure.timestamp, default=None)
    status = 1 if first is None else first.exitcode
    log.error("a rank ended with status %d and said nothing", status)
    sys.stderr.flush()
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status > 0 else 1)
