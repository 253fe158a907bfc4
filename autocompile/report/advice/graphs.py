"""Advice where a region is not one graph, or its CUDA graphs were not recorded."""

from __future__ import annotations

from autocompile.records import FailureKind
from autocompile.report.advice import changes, seen
from autocompile.report.advice.rule import Rule
from autocompile.report.advice.seen import failed, graph_break, skip

_BRANCH = r"[Dd]ata-dependent branching|Dynamic control flow"
_SCALAR = r"Tensor\.(item|tolist)\(\)|capture_scalar_outputs"
_SHAPE = r"Dynamic shape operator|capture_dynamic_output_shape_ops"
_PRINTS = r"builtin operator `print`|[Ll]ogg(er|ing)|warnings?\b"
_DISABLED = r"torch\.compiler\.disable|torch\._dynamo\.graph_break"
_REQUIRES_GRAD = r"requires_grad_\("
_COMPILER = r"^backend=.* raised"
_KNOWN_BREAKS = "|".join((_BRANCH, _SCALAR, _SHAPE, _PRINTS, _DISABLED, _REQUIRES_GRAD, _COMPILER))

_MUTATED, _ON_CPU, _SIZES = r"mutated inputs|input storage mutation", r"cpu device", r"dynamic shapes|symint"
_ADDRESSES = r"re-recording limit"
_KNOWN_SKIPS = "|".join((_MUTATED, _ON_CPU, _SIZES, _ADDRESSES))

_NO_GRAPHS_MODE = "or take a mode without CUDA graphs: default or max-autotune-no-cudagraphs"

GRAPHS = (
    Rule(
        cause="fullgraph",
        seen=failed(FailureKind.GRAPH_BREAK),
        change="change that line as below, or drop fullgraph: the region then runs in several graphs",
        sets=changes.to(fullgraph=False),
        each=True,
    ),
    Rule(
        cause="break_at_a_branch",
        seen=graph_break(_BRANCH),
        change="replace the branch on a tensor's value by torch.where, or by torch.cond",
        each=True,
    ),
    Rule(
        cause="break_at_a_scalar",
        seen=graph_break(_SCALAR),
        change="keep the value a tensor, or set torch._dynamo.config.capture_scalar_outputs = True",
        each=True,
    ),
    Rule(
        cause="break_at_a_data_dependent_shape",
        seen=graph_break(_SHAPE),
        change="mask with torch.where instead of selecting elements, or set "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
        each=True,
    ),
    Rule(
        cause="break_at_output",
        seen=graph_break(_PRINTS),
        change="print, log and warn outside forward, or only if not torch.compiler.is_compiling()",
        each=True,
    ),
    Rule(
        cause="break_on_request",
        seen=graph_break(_DISABLED),
        change="take torch.compiler.disable or graph_break() away, or compile a smaller scope without it",
        each=True,
    ),
    Rule(
        cause="break_at_requires_grad",
        seen=graph_break(_REQUIRES_GRAD),
        change="make inputs require gradients outside the compiled region; compiled per layer, LoRA with "
        "checkpointing needs none of it",
        sets=changes.whole_model_to_layers,
        each=True,
    ),
    Rule(
        cause="suppressed_error",
        seen=graph_break(_COMPILER),
        change="unset torch._dynamo.config.suppress_errors, which lets a frame run eager where its compile failed",
        each=True,
    ),
    Rule(
        cause="graph_break",
        seen=graph_break(".", but=_KNOWN_BREAKS),
        change="change this line so that dynamo can trace it, wrap a C extension as torch.library.custom_op, or "
        "compile a smaller scope that leaves it out",
        each=True,
    ),
    Rule(
        cause="never_called",
        seen=seen.never_called,
        change="let loss call the model it is given, model(batch): model.forward(...), model.model(...) and copies of "
        "it run eager",
        each=True,
    ),
    Rule(
        cause="nothing_compiled",
        seen=seen.nothing_compiled,
        change="compile the modules that do the work, with scope=layer or a pattern of dotted module names",
        sets=changes.to(scope="layer"),
    ),
    Rule(
        cause="unexplained",
        seen=seen.unexplained,
        change="read the trial's log.txt; TORCH_LOGS=graph_breaks,recompiles,cudagraphs makes torch say more there",
        each=True,
    ),
    Rule(
        cause="cudagraphs_with_accumulation",
        seen=seen.accumulates_under_cuda_graphs,
        change="with gradient accumulation take a mode without CUDA graphs, default or max-autotune-no-cudagraphs "
        "(pytorch#96693)",
        sets=changes.without_cuda_graphs,
    ),
    Rule(
        cause="cudagraph_input_mutated",
        seen=skip(_MUTATED),
        change=f"write to a new tensor at that line (x = x + 1 for x += 1), {_NO_GRAPHS_MODE}",
        sets=changes.without_cuda_graphs,
        each=True,
    ),
    Rule(
        cause="cudagraph_cpu_tensor",
        seen=skip(_ON_CPU),
        change=f"create that tensor on the GPU, {_NO_GRAPHS_MODE}",
        sets=changes.without_cuda_graphs,
        each=True,
    ),
    Rule(
        cause="cudagraph_sizes",
        seen=skip(_SIZES),
        change=f"pad or bucket the batches and compile with dynamic=false, {_NO_GRAPHS_MODE}",
        sets=changes.without_cuda_graphs,
        each=True,
    ),
    Rule(
        cause="cudagraph_addresses",
        seen=skip(_ADDRESSES),
        change=f"copy into tensors that stay (copy_) instead of replacing them between steps, {_NO_GRAPHS_MODE}",
        sets=changes.without_cuda_graphs,
        each=True,
    ),
    Rule(
        cause="cudagraph_skipped",
        seen=skip(".", but=_KNOWN_SKIPS),
        change=f"mend what the reason names, {_NO_GRAPHS_MODE}, which is what really ran",
        sets=changes.without_cuda_graphs,
        each=True,
    ),
    Rule(
        cause="cudagraphs_without_a_gpu",
        seen=seen.cuda_graphs_on_a_cpu,
        change="on a CPU it is the same without them",
        sets=changes.without_cuda_graphs,
    ),
    Rule(
        cause="cudagraph_output_overwritten",
        seen=failed(FailureKind.COMPILE_ERROR, "cudagraph_liveness"),
        change="clone what is kept from one step to the next (losses, gradients that accumulate), or take a mode "
        "without CUDA graphs: default or max-autotune-no-cudagraphs (pytorch#169545)",
        sets=changes.without_cuda_graphs,
    ),
    Rule(
        cause="cudagraphs_with_checkpointing",
        seen=failed(FailureKind.COMPILE_ERROR, "cudagraph_checkpoint"),
        change="gradient checkpointing needs a mode without CUDA graphs: default or max-autotune-no-cudagraphs "
        "(pytorch#154306)",
        sets=changes.without_cuda_graphs,
    ),
)
