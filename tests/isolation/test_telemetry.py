"""What telemetry makes of real compiles, and that each guard and break is known for what it is.

So a new version of torch with other words for them is noticed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autocompile.records import Measured, Role, State, Telemetry, TrialRecord
from autocompile.report.advice import advice
from autocompile.report.advice.guards import Guard, kind_of, line_of, source_of
from autocompile.slice.telemetry import skip_reason
from tests.isolation import compile_probe
from tests.unit import test_advice as cases

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen() -> dict[str, Telemetry]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.isolation.compile_probe"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=True).stdout
    return {name: Telemetry.model_validate(found) for name, found in json.loads(output).items()}


def line_that_reads(text: str) -> int:
    lines = Path(compile_probe.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("case", "kind", "source", "read_by"),
    [
        pytest.param("size", Guard.SIZE, "dimension 0 of args[0]", None, id="each size"),
        pytest.param("size, dynamic", Guard.SIZE, "dimension 0 of args[0]", None, id="a second size"),
        pytest.param("requires_grad", Guard.REQUIRES_GRAD, "args[0]", None, id="a first layer's input"),
        pytest.param("integer", Guard.INTEGER, "module.index", "return x * block.index", id="an integer of each layer"),
        pytest.param("float", Guard.VALUE, "module.scale", "return x * block.scale", id="a float of each layer"),
        pytest.param("flag", Guard.VALUE, "module.flag", "return x + 1 if block.flag", id="a flag that is set"),
        pytest.param("container", Guard.CONTAINER, "module.seen", "block.seen.append", id="a list that grows"),
        pytest.param("train and eval", Guard.MODE, "module.training", "nn.functional.dropout(", id="evaluation"),
        pytest.param("grad mode", Guard.MODE, "grad_mode", None, id="no gradients"),
        pytest.param("autocast", Guard.SETTING, "autocast(cpu)_enabled", None, id="autocast"),
        pytest.param("type", Guard.TYPE, "args[0]", None, id="another dtype"),
        pytest.param("layout", Guard.LAYOUT, "dimension 0 of args[0]", None, id="another layout"),
        pytest.param("class", Guard.OBJECT, "module._modules['linear']", "self.body(self", id="a module exchanged"),
    ],
)
def test_a_failed_guard_is_known_by_its_kind(
    seen: dict[str, Telemetry], case: str, kind: Guard, source: str, read_by: str | None
) -> None:
    first = seen[case].recompiles[0]
    assert first.where == "layer:Block"
    assert (kind_of(first.guard), source_of(first.guard)) == (kind, source), first.guard
    if read_by is not None:
        assert line_of(first.guard) == f"{compile_probe.__file__}:{line_that_reads(read_by)}"


@pytest.mark.parametrize(
    ("case", "causes"),
    [
        pytest.param("size over the limit", {"recompile_limit", "sizes"}, id="sizes"),
        pytest.param("integer over the limit", {"recompile_limit", "integer_attribute"}, id="integers"),
        pytest.param("integer over the limit, fullgraph", {"recompile_limit", "integer_attribute"}, id="fullgraph"),
        pytest.param("integer", {"integer_attribute"}, id="integers within the limit"),
        pytest.param("branch", {"break_at_a_branch"}, id="a branch on a tensor"),
        pytest.param("item", {"break_at_a_scalar"}, id="item()"),
        pytest.param("print", {"break_at_output"}, id="print and log"),
        pytest.param("disable", {"break_on_request"}, id="torch.compiler.disable"),
        pytest.param("loop", {"break_on_request"}, id="a break in a loop leaves the frame eager"),
        pytest.param("filter", {"break_at_a_data_dependent_shape"}, id="a boolean index"),
    ],
)
def test_what_dynamo_says_leads_to_its_advice(seen: dict[str, Telemetry], case: str, causes: set[str]) -> None:
    outcome = Measured(measurement=cases.measured(cases.LAYER).measurement, telemetry=seen[case])
    trial = TrialRecord(number=1, role=Role.SEARCH, state=State.COMPLETE, config=dict(cases.LAYER), outcome=outcome)
    assert {one.cause for one in advice(trial, cases.study(trial))} == causes


@pytest.mark.parametrize(
    ("case", "line"),
    [
        pytest.param("branch", "if x.sum() > 0:", id="a branch"),
        pytest.param("item", "return x * x.sum().item()", id="item()"),
        pytest.param("print", 'log.debug("a step")', id="in a library, called by this line"),
        pytest.param("disable", "return undisturbed(x)", id="a call"),
    ],
)
def test_a_break_names_the_line_to_change(seen: dict[str, Telemetry], case: str, line: str) -> None:
    assert seen[case].graph_breaks[0].where == f"{compile_probe.__file__}:{line_that_reads(line)}"


def test_frames_left_eager_are_told_with_their_reason(seen: dict[str, Telemetry]) -> None:
    assert not seen["integer"].eager_frames and seen["integer"].compile_applied == "all"
    for case, reason in (
        ("integer over the limit", "Dynamo recompile limit exceeded"),
        ("integer over the limit, fullgraph", "Hard failure due to fullgraph=True"),
        ("loop", "then graph break in loop"),
    ):
        (frame,) = seen[case].eager_frames
        assert reason in frame.reason and "\n" not in frame.reason
        assert seen[case].compile_applied == "some"


def test_a_break_that_fullgraph_refuses_is_told_with_its_line(seen: dict[str, Telemetry]) -> None:
    (frame,) = seen["branch, fullgraph"].eager_frames
    assert frame.where.endswith(f"compile_probe.py:{line_that_reads('if x.sum() > 0:')}")
    assert (frame.reason, seen["branch, fullgraph"].compile_applied) == ("Data-dependent branching", "none")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            "skipping cudagraphs due to mutated inputs (1 instances). Found from : \n"
            '   File "/home/me/job.py", line 5, in forward\n    self.seen.add_(1)\n',
            "skipping cudagraphs due to mutated inputs (1 instances) at /home/me/job.py:5",
            id="with the line that changes an input",
        ),
        pytest.param("skipping cudagraphs due to cpu device (arg1_1)", None, id="without a line"),
        pytest.param(
            "skipping cudagraph due to function 3 exceeding max re-recording limit (=128) on cudagraph node 1 due to "
            "static input data pointer changed.\ninput name: primals_2. data pointer changed from 1 to 2.",
            "skipping cudagraph due to function 3 exceeding max re-recording limit (=128) on cudagraph node 1 due to "
            "static input data pointer changed.",
            id="an address that changes",
        ),
    ],
)
def test_a_skipped_cuda_graph_has_its_reason_in_one_line(text: str, reason: str | None) -> None:
    assert skip_reason(text) == (reason or text)
