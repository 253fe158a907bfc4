"""Advice where a frame was compiled again, one row for each kind of guard that failed."""

from __future__ import annotations

from autocompile.records import FailureKind
from autocompile.report.advice import changes, seen
from autocompile.report.advice.guards import Guard
from autocompile.report.advice.rule import Rule
from autocompile.report.advice.seen import failed, guard

_NO_GRAPHS_MODE = "or take a mode without CUDA graphs: default or max-autotune-no-cudagraphs"

RECOMPILES = (
    Rule(
        cause="recompile_limit",
        seen=seen.limit_with_few_guards,
        change="first see to the guards below; where this many graphs are wanted, raise cache_size_limit",
        sets=changes.higher_limit,
    ),
    Rule(
        cause="endless_recompiles",
        seen=seen.limit_without_end,
        change="keep constant what the guards below name; a higher cache_size_limit would only be hit later",
    ),
    Rule(
        cause="sizes",
        seen=guard(Guard.SIZE, "{where} was compiled again for another size: {source}"),
        change="pad or bucket the batches to a few sizes and drop the last partial one, or leave the size symbolic: "
        "dynamic=auto from the second size on, dynamic=marked at once (torch._dynamo.mark_dynamic on the sequence "
        "dimension), dynamic=true for every size",
        sets=changes.symbolic_sizes,
        each=True,
    ),
    Rule(
        cause="sizes_under_cuda_graphs",
        seen=seen.sizes_under_cuda_graphs,
        change=f"pad or bucket the batches to a few sizes, {_NO_GRAPHS_MODE}",
        sets=changes.without_cuda_graphs,
    ),
    Rule(
        cause="input_gradients",
        seen=guard(
            Guard.REQUIRES_GRAD, "{where} has a graph for inputs that need gradients and one for those that do not"
        ),
        change="usual with LoRA, whose first layer gets an input without gradient: call "
        "model.enable_input_require_grads() before compiling, then all layers share one graph and compile in half "
        "the time; elsewhere give every call inputs of one kind",
    ),
    Rule(
        cause="integer_attribute",
        seen=guard(Guard.INTEGER, "{where} was compiled again for each value of {source}, read at {line}"),
        change="keep the number in a tensor (self.register_buffer) if it takes part in arithmetic, or set "
        "torch._dynamo.config.allow_unspec_int_on_nn_module = True before the first step; equal modules with a "
        "number each then share one graph",
        each=True,
    ),
    Rule(
        cause="mode_switch",
        seen=guard(
            Guard.MODE, "{where} was compiled again when {source} changed: training and evaluation are two graphs"
        ),
        change="normal once for each; switch the whole model with train() and eval(), evaluate under one kind of "
        "no_grad, and leave room for these graphs in cache_size_limit",
        each=True,
    ),
    Rule(
        cause="process_setting",
        seen=guard(Guard.SETTING, "{where} was compiled again when {source} changed"),
        change="enter autocast and set threads and default dtype in the same way around every step",
        each=True,
    ),
    Rule(
        cause="input_type",
        seen=guard(Guard.TYPE, "{where} was compiled again for another dtype, device or rank of {source}"),
        change="give every call tensors of one dtype, device and number of dimensions",
        each=True,
    ),
    Rule(
        cause="input_layout",
        seen=guard(Guard.LAYOUT, "{where} was compiled again for another memory layout: {source}"),
        change="call .contiguous() on it before the compiled region",
        each=True,
    ),
    Rule(
        cause="growing_container",
        seen=guard(Guard.CONTAINER, "{where} was compiled again as {source} held more or less, read at {line}"),
        change="keep lists and dictionaries that grow out of forward, or empty them before each step",
        each=True,
    ),
    Rule(
        cause="other_object",
        seen=guard(Guard.OBJECT, "{where} was compiled again for another object or class at {source}"),
        change="let equal modules share it: one processor, hook or wrapper for all, checkpoint wrappers around every "
        "layer or none",
        each=True,
    ),
    Rule(
        cause="python_value",
        seen=guard(Guard.VALUE, "{where} was compiled again for another value of {source}, read at {line}"),
        change="pass it as a tensor, or keep it constant from step to step",
        each=True,
    ),
    Rule(
        cause="other_guard",
        seen=guard(Guard.OTHER, "{where} was compiled again because of {source}"),
        change="keep constant from step to step what the guard names, or move it out of the compiled region",
        each=True,
    ),
    Rule(
        cause="recompile_storm",
        seen=failed(FailureKind.RECOMPILE_STORM, but=lambda case: case.limit_hit),
        change="make constant what the guards below name; a config that compiles all the time cannot be used",
    ),
)
