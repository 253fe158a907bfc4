"""``python -m autocompile.slice FOLDER``: answer FOLDER/request.json with FOLDER/outcome.json.

It ends with its parent, which holds this process's standard input open.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from autocompile.records import Answer, Failed, Stage
from autocompile.slice.merge import merge
from autocompile.slice.process import begin, limit_compile_threads
from autocompile.spec import MeasureRequest, PreflightRequest
from autocompile.values import write_aside


def main(folder: Path) -> None:
    request = begin(folder)
    match request:
        case MeasureRequest():
            answer: Answer = _measurement(request, folder)
        case PreflightRequest():
            answer = _facts(request, folder)
    logging.getLogger("autocompile.slice").info("answered: %s", answer.type)
    write_aside(folder / "outcome.json", answer.model_dump_json())


def _measurement(request: MeasureRequest, folder: Path) -> Answer:
    """Of one rank in this process, of several in processes of their own."""
    if request.workload.gpus_per_trial > 1:
        from autocompile.slice.launch import launch

        return merge(launch(folder, request.workload.gpus_per_trial))
    limit_compile_threads(request.compile_threads)
    from autocompile.slice.rank import answered  # with dynamo, whose import needs a sound cache folder

    return merge([answered(request, folder)])


def _facts(request: PreflightRequest, folder: Path) -> Answer:
    from autocompile.slice.classify import classify
    from autocompile.slice.preflight import preflight
    from autocompile.slice.progress import Reporter

    with Reporter(folder / "progress.json") as reporter:
        reporter.enter(Stage.PREFLIGHT)
        try:
            return preflight(request, reporter.enter)
        except Exception as error:  # noqa: BLE001  the process ends here; the parent turns the failure into one line
            return Failed(failure=classify(error, stage=Stage.PREFLIGHT, memory_share=reporter.memory_share()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the outcome is written; compile workers and CUDA contexts take seconds to say goodbye
