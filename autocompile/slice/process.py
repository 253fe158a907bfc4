"""What each process of a slice does first: watch its parent, set up its log and environment, read what is asked."""

from __future__ import annotations

import faulthandler
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from autocompile.processes import end_own_tree
from autocompile.spec import MeasureRequest, SliceRequest

REQUEST: TypeAdapter[SliceRequest] = TypeAdapter(SliceRequest)

_LOOK_SECONDS = 0.5
_INIT = 1  # who gets a process whose parent ended


def begin(folder: Path) -> SliceRequest:
    """Before dynamo and CUDA, which read the environment, and before torch, which counts CPUs."""
    request = REQUEST.validate_json((folder / "request.json").read_text())
    if isinstance(request, MeasureRequest):
        _keep_to(request.cpus)
    _end_with_parent()
    faulthandler.enable()  # a crash leaves its place in the log
    logging.basicConfig(format="%(message)s")
    logging.getLogger("autocompile").setLevel(logging.INFO)  # stages and their times, into the slice's log
    _set_up_environment(request)
    return request


def end_when_orphaned() -> None:
    """For a rank: its launcher may be killed by hand, and then nobody closes a pipe."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent != _INIT:
            time.sleep(_LOOK_SECONDS)
        end_own_tree()

    _watch(wait)


def limit_compile_threads(count: int | None) -> None:
    """Before the first compile, which starts inductor's workers; with one thread it has none."""
    if count is not None:
        from torch._inductor import config

        config.compile_threads = count


def _keep_to(cpus: Sequence[int]) -> None:
    """While this is the only thread: all later ones and all children inherit it. Where that cannot be, all are used."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    n_before = len(os.sched_getaffinity(0))
    with suppress(OSError):  # a sandbox refuses, or the CPUs were taken away since
        os.sched_setaffinity(0, cpus)
    if "torch" in sys.modules:
        _count_again(n_before)


def _count_again(n_before: int) -> None:
    """What torch counted in the process that this was forked from, which has so many CPUs."""
    import torch
    from torch._inductor import config

    config.compile_threads = config.decide_compile_threads()
    if "OMP_NUM_THREADS" not in os.environ:  # who sets it has decided for all slices
        share = torch.get_num_threads() * len(os.sched_getaffinity(0)) // n_before  # of cores, which MKL counts
        torch.set_num_threads(max(1, share))


def _set_up_environment(request: SliceRequest) -> None:
    """As the parent does, so that a folder replays by hand."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = request.cache_folder
    for name in ("TRITON_CACHE_DIR", "TORCH_COMPILE_JOB_ID"):
        os.environ.pop(name, None)
    if request.devices:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, request.devices)))


def _end_with_parent() -> None:
    """When the pipe or socket on stdin closes, end all that this slice started. Only where a parent set it up so."""
    leads_group = os.getpgid(0) == os.getpid()
    mode = os.fstat(0).st_mode
    if leads_group and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        _watch(_wait_for_end_of_input)


def _wait_for_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    end_own_tree()


def _watch(wait: Callable[[], None]) -> None:
    threading.Thread(target=wait, daemon=True).start()
