"""What one trial's records show: the questions that advice asks of them, each answered with what was seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from autocompile.knob_table import materialises_mask, records_cuda_graphs
from autocompile.records import (
    Degradation,
    EagerFrame,
    Failure,
    FailureKind,
    Measurement,
    Recompile,
    Region,
    Telemetry,
    TrialRecord,
)
from autocompile.report.advice.guards import Guard, kind_of, line_of, source_of
from autocompile.report.study import Study
from autocompile.space import Config
from autocompile.spec import gradient_accumulation

_FEW_GUARDS = 3
_LIMIT = re.compile(r"recompile limit exceeded|Hard failure due to fullgraph|fail_on_recompile_limit_hit")
_DATA_BOUND = 0.2  # share of a step that it waits for its batch
_KERNELS = (("cudnn", r"cudnn"), ("flash", r"flash"), ("efficient", r"efficient|fmha"), ("math", r"math"))


@dataclass(frozen=True)
class Case:
    """One trial and the study around it."""

    record: TrialRecord
    study: Study

    @property
    def config(self) -> Config:
        return self.record.config

    @property
    def failure(self) -> Failure | None:
        return self.record.failure

    @property
    def measurement(self) -> Measurement | None:
        return self.record.measurement

    @cached_property
    def telemetry(self) -> Telemetry:
        return self.record.outcome.telemetry if self.record.outcome else Telemetry()

    @property
    def compiled(self) -> bool:
        return self.config["scope"] != "none"

    @property
    def records_graphs(self) -> bool:
        return records_cuda_graphs(self.config)

    @property
    def on_gpu(self) -> bool:
        return self.study.facts.devices[0].type == "cuda"

    @property
    def others(self) -> list[TrialRecord]:
        return [record for record in self.study.records if record.number != self.record.number]

    @property
    def eager_frames(self) -> tuple[EagerFrame, ...]:
        """Those that a slice went on with; one that broke off names the frame that did it among them."""
        went_on = self.failure is None or self.failure.kind is FailureKind.RECOMPILE_STORM
        return self.telemetry.eager_frames if went_on else ()

    @cached_property
    def limit_hit(self) -> str | None:
        """Where a frame went over its recompile limit."""
        frames = self.telemetry.eager_frames
        return next((frame.where for frame in frames if _LIMIT.search(frame.reason)), None)

    def region(self, name: str) -> Region | None:
        return next((region for region in self.telemetry.regions if region.name == name), None)


Seen: TypeAlias = Callable[[Case], Sequence[str]]


def guard(kind: Guard, what: str) -> Seen:
    """Recompiles for a guard of this kind; ``what`` may name {where}, {source} and {line}."""

    def seen(case: Case) -> list[str]:
        found = [one for one in case.telemetry.recompiles if kind_of(one.guard) is kind]
        return _distinct(
            what.format(where=one.where, source=source_of(one.guard), line=line_of(one.guard) or one.where)
            for one in found
        )

    return seen


def graph_break(pattern: str, *, but: str | None = None) -> Seen:
    """Breaks, and frames left eager, whose reason matches; ``but`` are reasons that another rule knows better."""

    def seen(case: Case) -> list[str]:
        found = [(one.where, one.reason) for one in case.telemetry.graph_breaks]
        found += [(one.where, one.reason) for one in case.eager_frames]
        if case.failure and case.failure.kind is FailureKind.GRAPH_BREAK:
            found.append((case.failure.where or "an unknown line", case.failure.message))
        fitting = [
            (where, reason)
            for where, reason in found
            if re.search(pattern, reason) and not (but and re.search(but, reason)) and not _LIMIT.search(reason)
        ]
        places = dict(reversed(fitting))  # the first reason of each place
        return [f"{where}: {_sentence(reason)}" for where, reason in reversed(places.items())]

    return seen


def skip(pattern: str, *, but: str | None = None) -> Seen:
    """Skipped CUDA graphs whose reason matches, on a GPU."""

    def seen(case: Case) -> list[str]:
        reasons = [found.reason for found in case.telemetry.cudagraph_skips] if case.on_gpu else []
        return _distinct(
            reason for reason in reasons if re.search(pattern, reason) and not (but and re.search(but, reason))
        )

    return seen


def failed(kind: FailureKind, subkind: str | None = None, *, but: Callable[[Case], object] | None = None) -> Seen:
    """A failure of this kind, in the words of its message."""

    def seen(case: Case) -> list[str]:
        found = case.failure
        if found is None or found.kind is not kind or (subkind and found.subkind != subkind) or (but and but(case)):
            return []
        place = f" ({found.where})" if found.where else ""
        return [f"{found.kind} in {found.stage}: {_sentence(found.message)}{place}"]

    return seen


def flag(name: Degradation, what: str) -> Seen:
    """A measurement with this flag; ``what`` may name {limits}, what held the GPU's clock down."""

    def seen(case: Case) -> list[str]:
        if case.measurement is None or name not in case.measurement.degraded:
            return []
        limits = case.measurement.gpu.limits if case.measurement.gpu else ()
        return [what.format(limits=", ".join(limits) or "an unnamed limit")]

    return seen


def limit_with_few_guards(case: Case) -> list[str]:
    """A limit that is hit by a bounded number of variants: not by a value that is another one at every step."""
    if case.limit_hit is None or _is_endless(case):
        return []
    return [f"{case.limit_hit} went over its {case.config['cache_size_limit']} graphs and runs eager since"]


def limit_without_end(case: Case) -> list[str]:
    if case.limit_hit is None or not _is_endless(case):
        return []
    return [f"{case.limit_hit} went over its {case.config['cache_size_limit']} graphs, and more would follow"]


def _is_endless(case: Case) -> bool:
    guards = {(kind_of(one.guard), source_of(one.guard)) for one in case.telemetry.recompiles}
    return len(guards) > _FEW_GUARDS or any(_changes_at_each_step(case, one) for one in case.telemetry.recompiles)


def _changes_at_each_step(case: Case, one: Recompile) -> bool:
    """A value that a single module keeps can only have changed from step to step; equal modules may differ in it."""
    kept = kind_of(one.guard) in (Guard.INTEGER, Guard.VALUE, Guard.CONTAINER, Guard.STACK)
    region = case.region(one.where)
    return kept and (region is None or region.modules < 2)


def sizes_under_cuda_graphs(case: Case) -> list[str]:
    sizes = [one for one in case.telemetry.recompiles if kind_of(one.guard) is Guard.SIZE]
    return ["each new size is recorded as CUDA graphs of its own"] if sizes and case.records_graphs else []


def cuda_graphs_on_a_cpu(case: Case) -> list[str]:
    wanted = case.records_graphs and not case.on_gpu and case.telemetry.cudagraph_skips
    knob = "mode" if case.config["backend"] == "inductor" else "backend"
    return [f"{knob}={case.config[knob]} wants CUDA graphs, and there is no GPU"] if wanted else []


def accumulates_under_cuda_graphs(case: Case) -> list[str]:
    n_micro_batches = gradient_accumulation(case.study.spec.workload, case.config)
    if not case.records_graphs or n_micro_batches == 1:
        return []
    return [f"gradients of {n_micro_batches} micro-batches are summed where a replayed graph may overwrite them"]


def forced_flash_in_a_whole_model_trace(case: Case) -> object:
    unsupported = case.failure is not None and case.failure.kind is FailureKind.BACKEND_UNSUPPORTED
    return unsupported and materialises_mask(case.config) and case.config["sdpa"] == "flash"


def mask_instead_of_flash(case: Case) -> list[str]:
    if forced_flash_in_a_whole_model_trace(case):
        return ["a whole-model trace materialises the causal mask, which flash attention does not take"]
    return []


def slower_attention_in_a_whole_model_trace(case: Case) -> list[str]:
    """The same workload runs flash or cuDNN where the model is not traced as a whole."""
    if not materialises_mask(case.config) or case.config["sdpa"] != "auto" or not case.telemetry.sdpa_kernels:
        return []
    fast = {name for record in case.others for name in _fast_kernels(record)}
    if not fast or _fast_kernels(case.record):
        return []
    return [f"{', '.join(case.telemetry.sdpa_kernels)} ran, {', '.join(sorted(fast))} where the model is not traced"]


def _fast_kernels(record: TrialRecord) -> list[str]:
    """Of those that take no mask; a CPU's takes one."""
    if record.outcome is None or record.config["sdpa"] != "auto":
        return []
    kernels = record.outcome.telemetry.sdpa_kernels
    return [name for name in kernels if _backend(name) in ("cudnn", "flash") and not name.endswith("_cpu")]


def another_kernel_ran(case: Case) -> list[str]:
    wanted, ran = str(case.config["sdpa"]), case.telemetry.sdpa_kernels
    if wanted == "auto" or not ran or wanted in map(_backend, ran):
        return []
    return [f"sdpa={wanted} was asked for and {', '.join(ran)} ran"]


def _backend(kernel: str) -> str | None:
    return next((name for name, pattern in _KERNELS if re.search(pattern, kernel)), None)


def dynamic_for_one_shape(case: Case) -> list[str]:
    """Known where the workload has one shape, or where the same scope met no second size without it."""
    if not case.compiled or case.config["dynamic"] != "true":
        return []
    scope = case.config["scope"]
    alike = [one for one in case.others if one.config["scope"] == scope and one.config["dynamic"] != "true"]
    measured = [one.outcome.telemetry for one in alike if one.outcome and one.measurement]
    if any(kind_of(again.guard) is Guard.SIZE for found in measured for again in found.recompiles):
        return []
    one_shape = case.study.spec.workload.model is not None or bool(measured)
    return ["dynamic=true compiles symbolic sizes for a workload that has one size"] if one_shape else []


def never_called(case: Case) -> list[str]:
    return [f"{region.name} was never called" for region in case.telemetry.regions if region.calls == 0]


def nothing_compiled(case: Case) -> list[str]:
    """Of a region that was called, without a word of dynamo's."""
    if not case.compiled or case.failure or case.eager_frames or case.telemetry.compile_applied == "all":
        return []
    regions = [region for region in case.telemetry.regions if region.modules and not region.graphs]
    if not regions and case.telemetry.compile_applied == "none":
        return [f"scope={case.config['scope']} was asked for and nothing was compiled"]
    return [f"{region.name} was called and never compiled" for region in regions if region.calls != 0]


def unexplained(case: Case) -> list[str]:
    """Flags of a slice that told no reason for them."""
    telemetry, found = case.telemetry, case.measurement
    reasons: dict[str, object] = {
        "partial_eager": telemetry.eager_frames or never_called(case) or nothing_compiled(case),
        "graph_breaks": telemetry.graph_breaks,
        "cudagraph_skipped": telemetry.cudagraph_skips,
    }
    flags = found.degraded if found else ()
    return [f"flagged {name.replace('_', ' ')}, without a reason" for name in flags if not reasons.get(name, True)]


def waits_for_data(case: Case) -> list[str]:
    found = case.measurement
    if found is None or not found.data_wait_seconds:
        return []
    share = found.data_wait_seconds / found.step_seconds.median
    return [f"{share:.0%} of a step is spent waiting for its batch"] if share >= _DATA_BOUND else []


def cut_short(case: Case) -> list[str]:
    by_budget = case.record.stopped is not None and case.record.stopped.reason == "budget"
    return ["the budget ended before this slice did"] if by_budget and case.failure is None else []


def _sentence(text: str) -> str:
    """In one line, without torch's own advice to its developers."""
    return " ".join(text.split()).rstrip(".")


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
