"""``python -m autocompile.slice FOLDER``: answer FOLDER/request.json with FOLDER/outcome.json.

It ends with its parent, which holds this process's standard input open.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import stat
import sys
import threading
import time
from pathlib import Path

from pydantic import TypeAdapter

from autocompile.processes import end_own_tree
from autocompile.records import Answer, Failed, Stage
from autocompile.slice.classify import classify
from autocompile.slice.merge import RankOutcome, merge
from autocompile.slice.progress import Reporter
from autocompile.spec import MeasureRequest, PreflightRequest, SliceRequest
from autocompile.values import write_aside

REQUEST: TypeAdapter[SliceRequest] = TypeAdapter(SliceRequest)


def main(folder: Path) -> None:
    _end_with_parent()
    faulthandler.enable()  # a crash leaves its place in the log
    logging.basicConfig(format="%(message)s")
    logging.getLogger("autocompile").setLevel(logging.INFO)  # stages and their times, into the slice's log
    request = REQUEST.validate_json((folder / "request.json").read_text())
    _set_up_environment(request)
    with Reporter(folder) as reporter:
        answer = _answer(request, folder, reporter)
        logging.getLogger("autocompile.slice").info("answered: %s", answer.type)
    write_aside(folder / "outcome.json", answer.model_dump_json())


def _answer(request: SliceRequest, folder: Path, reporter: Reporter) -> Answer:
    match request:
        case MeasureRequest():
            _limit_compile_threads(request.compile_threads)
            from autocompile.slice.rank import run_rank  # with dynamo, whose import needs a sound cache folder

            outcome = run_rank(request, reporter)
            rank = RankOutcome(rank=0, time=time.time(), outcome=outcome)
            write_aside(folder / "rank0.json", rank.model_dump_json())
            return merge([rank])
        case PreflightRequest():
            return _facts(request, reporter)


def _limit_compile_threads(count: int | None) -> None:
    """Before the first compile, which starts inductor's workers; with one thread it has none."""
    if count is not None:
        from torch._inductor import config

        config.compile_threads = count


def _facts(request: PreflightRequest, reporter: Reporter) -> Answer:
    from autocompile.slice.preflight import preflight

    reporter.enter(Stage.PREFLIGHT)
    try:
        return preflight(request, reporter.enter)
    except Exception as error:  # noqa: BLE001  the process ends here; the parent turns the failure into one line
        return Failed(failure=classify(error, stage=Stage.PREFLIGHT, memory_share=reporter.memory_share()))


def _set_up_environment(request: SliceRequest) -> None:
    """As the parent does, so that a folder replays by hand. Dynamo and CUDA, which read these, come later."""
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
        threading.Thread(target=_wait_for_end_of_input, daemon=True).start()


def _wait_for_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    end_own_tree()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the outcome is written; compile workers and CUDA contexts take seconds to say goodbye
