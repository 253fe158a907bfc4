"""What the compiler and the kernels really did, from torch's own counters and metrics."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch._dynamo
from torch._dynamo import utils as dynamo
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

from autocompile.knobs.setup import CompiledGroup, Setup
from autocompile.records import Compile, CudagraphSkip, EagerFrame, GraphBreak, Recompile, Region, Telemetry

_CUDAGRAPH_LOG = "torch._inductor.cudagraph_utils.__cudagraphs"
_LIMIT = "recompile limit exceeded"


class CompileObserver:
    """Watches one process from before its first compile. Use as a context manager, one at a time.

    Counts come from `torch._dynamo.utils` (CompilationMetrics, counters, graph_break_reasons); output code from
    the hook that inductor calls on a miss and on a cache hit alike. Log text is read only for skipped CUDA graphs,
    whose reasons exist nowhere else.
    """

    def __enter__(self) -> CompileObserver:
        dynamo.set_compilation_metrics_limit(100_000)  # the default keeps the last 64
        self._codes: list[tuple[str, str]] = []
        self._skips = _Messages()
        self.activity = 0
        self.groups: Sequence[
            CompiledGroup
        ] = ()  # whoever compiles regions says so, and they are called by their names
        logging.getLogger(_CUDAGRAPH_LOG).addHandler(self._skips)
        self._previous_hook = GraphLowering.save_output_code
        GraphLowering.save_output_code = self._save_code
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger(_CUDAGRAPH_LOG).removeHandler(self._skips)
        GraphLowering.save_output_code = self._previous_hook
        self._stop_counting()

    def restart(self) -> None:
        """Forget what happened so far. `torch._dynamo.reset` drops callbacks, so call this after one."""
        self._stop_counting()
        torch._dynamo.callback.on_compile_start(self._started)
        dynamo.counters.clear()
        dynamo.clear_compilation_metrics()
        dynamo.graph_break_reasons.clear()
        self._codes.clear()
        self._skips.texts.clear()

    def n_compiles(self) -> int:
        """Compiles of any kind so far, failed ones and CUDA-graph recordings included.

        A reset of dynamo is one too: DeepSpeed's DeepCompile does that to compile with other passes.
        """
        if self._started not in torch._dynamo.callback_handler.start_callbacks:
            torch._dynamo.callback.on_compile_start(self._started)
            self.activity += 1
        return self.activity

    def n_recompiles(self) -> int:
        return sum(1 for metric in _metrics() if metric.recompile_reason)

    def limit_hits(self) -> list[str]:
        """Where a frame went over its recompile limit and runs eager since: the region, or ``name file:line``."""
        return [_place(metric, self.groups) for metric in _metrics() if _LIMIT in (metric.fail_reason or "")]

    def compile_cost(self) -> Compile:
        """Seconds of tracing, lowering, code generation and autotuning, and what a cold cache would have cost.

        torch keeps with each cached graph how long it took to make; its name in the metrics is historical.
        """
        seconds = _seconds(
            "dynamo_cumulative_compile_time_us",
            "runtime_triton_autotune_time_us",
            "runtime_cudagraphify_time_us",
            where=lambda metric: metric.is_forward is not False,
        ) + _seconds(
            "backward_cumulative_compile_time_us",
            "runtime_triton_autotune_time_us",
            "runtime_cudagraphify_time_us",
            where=lambda metric: metric.is_forward is False,
        )
        saved = _seconds("distributed_ephemeral_timeout_us")
        return Compile(seconds=seconds, cold_seconds=seconds + saved, cache=_cache_state())

    def telemetry(self, setup: Setup | None) -> Telemetry:
        """Everything seen so far; ``setup`` is None where the slice failed before knobs were applied."""
        groups = setup.groups if setup else ()
        return Telemetry(
            compile_applied=self._compile_applied(groups),
            sdpa_applied=setup.sdpa_applied if setup else None,
            checkpointing=setup.checkpointing if setup else None,
            regions=self._regions(groups),
            graphs=dynamo.counters["stats"]["unique_graphs"],
            bucket_graphs=sum(map(_is_cut, dynamo.graph_break_reasons)) or None,
            graph_breaks=_graph_breaks(),
            recompiles=tuple(
                Recompile(where=_place(metric, groups), guard=guard_text(metric.recompile_reason))
                for metric in _metrics()
                if metric.recompile_reason
            ),
            eager_frames=_eager_frames(groups),
            cudagraph_skips=self._cudagraph_skips(),
        )

    def _stop_counting(self) -> None:
        with suppress(ValueError):  # not registered, or dropped by a reset
            torch._dynamo.callback_handler.remove_start_callback(self._started)

    def _started(self, *_args: object) -> None:
        self.activity += 1

    def _save_code(self, code: str) -> None:
        compile_id = torch._guards.CompileContext.current_compile_id()
        frame = str(compile_id).split("/")[0] if compile_id else ""
        self._codes.append((frame, code_hash(code)))

    def _regions(self, groups: Sequence[CompiledGroup]) -> tuple[Region, ...]:
        """The groups that were asked for, then any other frame that was compiled, such as the rest after a break."""
        by_frame = {group.frame: group for group in groups}
        names, compiled = _frame_names(), _compiled_frames()
        regions = []
        for frame in dict.fromkeys([*by_frame, *compiled]):
            group = by_frame.get(frame)
            # Sorted: a warm cache loads forward and backward together, a cold one compiles the backward later.
            hashes = sorted({code for frame_id, code in self._codes if names.get(frame_id, "?") == frame})
            regions.append(
                Region(
                    name=group.name if group else frame,
                    modules=len(group.modules) if group else 0,
                    graphs=compiled.count(frame),
                    calls=group.calls if group else None,
                    code_hashes=tuple(hashes),
                )
            )
        return tuple(regions)

    def _compile_applied(self, groups: Sequence[CompiledGroup]) -> Literal["all", "some", "none"]:
        compiled = _compiled_frames()
        working = [group for group in groups if group.frame in compiled and group.calls]
        if not working:
            return "none"
        whole = len(working) == len(groups) and not any(metric.fail_type for metric in _metrics())
        return "all" if whole else "some"

    def _cudagraph_skips(self) -> tuple[CudagraphSkip, ...]:
        reasons = [text for text in self._skips.texts if "skipping cudagraph" in text]
        reasons += [m.cudagraph_skip_reason for m in _metrics() if getattr(m, "cudagraph_skip_reason", None)]
        if not reasons and dynamo.counters["inductor"]["cudagraph_skips"]:
            reasons = ["inductor gave no reason"]
        return tuple(CudagraphSkip(reason=reason) for reason in dict.fromkeys(map(skip_reason, reasons)))


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def graphs_of(setup: Setup) -> dict[str, int]:
    """Graphs of each compiled group so far, by its name, in this process."""
    named = {group.frame: group.name for group in setup.groups}
    compiled = [named.get(name, "") for name in _compiled_frames()]
    return {name: compiled.count(name) for name in named.values()}


def code_hash(code: str) -> str:
    """SHA-256 of inductor's output code without comments, docstring-like source notes and absolute paths.

    So the hash is the same from a cold and a warm cache and in another folder.
    """
    lines = [re.sub(r"\s+#\s.*$", "", line) for line in code.splitlines()]
    kept = [
        line
        for line in lines
        if line.strip() and not re.match(r"\s*(#(?!include|pragma|define|if|endif|else)|//)", line)
    ]
    without_paths = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", "\n".join(kept))
    return hashlib.sha256(without_paths.encode()).hexdigest()


def sdpa_kernels(names: Sequence[str]) -> tuple[str, ...]:
    """Of the operators and kernels that a profiler saw, those that compute scaled_dot_product_attention, forward."""
    wanted = re.compile(r"_scaled_dot_product_\w+|flash_fwd\w*|fmha\w*|cudnn\w*sdpa\w*", re.IGNORECASE)
    backward = re.compile(r"backward|bprop|_bwd", re.IGNORECASE)
    found = {match[0] for name in names if (match := wanted.search(name)) and not backward.search(name)}
    return tuple(sorted(found))


def compiled_sdpa_kernels() -> tuple[str, ...]:
    """The attention operators in the output code that this process has loaded: what its compiled regions run."""
    sources = [Path(module.__file__).read_text() for module in PyCodeCache.modules if module.__file__]
    return sdpa_kernels([line for source in sources for line in source.splitlines()])


def _metrics() -> list[Any]:
    """Records of compiles; the ones torch adds for work at run time say so."""
    return list(dynamo.get_compilation_metrics())


def _seconds(*fields: str, where: Callable[[Any], bool] = lambda metric: True) -> float:
    return sum(getattr(metric, field, None) or 0 for metric in _metrics() if where(metric) for field in fields) / 1e6


def _frame_id(metric: Any) -> str:
    return str(metric.compile_id).split("/")[0]


def _frame_names() -> dict[str, str]:
    return {_frame_id(metric): metric.co_name for metric in _metrics() if metric.co_name}


def _compiled_frames() -> list[str]:
    """The name of the frame of each graph, in the order they were compiled."""
    names = _frame_names()
    return [names.get(_frame_id(metric), "?") for metric in _metrics() if metric.is_forward and metric.has_guarded_code]


def _place(metric: Any, groups: Sequence[CompiledGroup]) -> str:
    """The region, or ``function file:line``. A record of a hit limit names no frame; its id leads to one that does."""
    for other in _metrics():
        if other.co_name and _frame_id(other) == _frame_id(metric):
            named = {group.frame: group.name for group in groups}
            return named.get(other.co_name, f"{other.co_name} {other.co_filename}:{other.co_firstlineno}")
    return "unknown frame"


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def guard_text(text: str) -> str:
    """The guard, in one line, with the whole path of the line that made it, which dynamo cuts to its end."""
    guard, _, stack = text.strip().partition("\n")
    for path, line in re.findall(r'File "([^"]+)", line (\d+)', stack):
        cut = re.search(rf"# (\S+):{line} in ", guard)
        if cut and path.endswith(cut[1].rpartition("/")[2]):
            guard = guard.replace(f"{cut[1]}:{line} in ", f"{path}:{line} in ")
    return guard


def _graph_breaks() -> tuple[GraphBreak, ...]:
    """Each reason and place once: torch repeats them per nested frame and per recompile."""
    seen: dict[GraphBreak, None] = {}
    for found in itertools.filterfalse(_is_cut, dynamo.graph_break_reasons):
        stack = [(frame.filename, frame.lineno or 0) for frame in found.user_stack]
        seen[GraphBreak(where=_line_to_change(stack), reason=break_reason(found.reason))] = None
    return tuple(seen)


def _is_cut(reason: Any) -> bool:
    """Whether this is a piece of a graph that DDP cut at the border of a bucket, which breaks nothing."""
    return "DDPOptimizer intentional graph-break" in str(reason.reason)


def _eager_frames(groups: Sequence[CompiledGroup]) -> tuple[EagerFrame, ...]:
    """Frames that dynamo gave up: skipped as a whole, failed in the compiler, or over their recompile limit."""
    seen: dict[EagerFrame, None] = {}
    for metric in _metrics():
        if metric.fail_type:
            name = metric.fail_user_frame_filename
            where = f"{name}:{metric.fail_user_frame_lineno}" if name else _place(metric, groups)
            seen[EagerFrame(where=where, reason=break_reason(metric.fail_reason or metric.fail_type))] = None
    return tuple(seen)


_AND_THEN = "*** While handling this graph break, another graph break occurred: ***"


def break_reason(text: str) -> str:
    """One line: the head of dynamo's text with the first sentence of its explanation, which alone says what it met."""
    return "; then ".join(_head(part.strip()) for part in text.split(_AND_THEN))


def _head(text: str) -> str:
    if text.startswith(("generic_jump", "Data-dependent branching")):  # two names, often at one place
        return "Data-dependent branching"
    head, _, rest = text.partition("\n")
    explained = re.search(r"^\s*Explanation: (.+?)(\. [A-Z]|\.?$)", text, re.MULTILINE)  # its first sentence
    said = explained[1] if explained else _first_line(rest) if head.endswith(":") else ""
    reason = f"{head.removesuffix(':')}: {said}" if said else head
    return re.sub(r" at 0x[0-9a-f]+", "", reason)  # an address differs in every process


def _line_to_change(stack: Sequence[tuple[str, int]]) -> str:
    """The deepest line that is neither torch's nor the standard library's, else the deepest of all."""
    if not stack:
        return "unknown place"
    name, line = ([place for place in stack if not _is_library(place[0])] or stack)[-1]
    return f"{name}:{line}"


def _is_library(name: str) -> bool:
    torch_itself, standard = str(Path(torch.__file__).parent), str(Path(logging.__file__).parents[1])
    return name.startswith(torch_itself) or (name.startswith((standard, "<")) and "site-packages" not in name)


def skip_reason(text: str) -> str:
    """One line; where inductor adds a stack trace, with the line of it to change."""
    stack = [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', text)]
    reason = re.sub(r"\.? Found from\s*:?\s*$", "", _first_line(text))
    return f"{reason} at {_line_to_change(stack)}" if stack else reason


def _cache_state() -> Literal["none", "cold", "partly", "warm"]:
    inductor, aot = dynamo.counters["inductor"], dynamo.counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"] + aot["autograd_cache_hit"]
    misses = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    misses += aot["autograd_cache_miss"] + aot["autograd_cache_bypass"]
    if not hits and not misses:
        return "none"
    if not hits:
        return "cold"
    return "partly" if misses else "warm"
