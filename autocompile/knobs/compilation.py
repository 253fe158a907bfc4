"""How something is compiled: what torch.compile is told whatever its backend."""

from __future__ import annotations

from dataclasses import replace

from autocompile.knob_table import CUDA_GRAPH_MODES
from autocompile.knobs.setup import Setup, knob


@knob("backend")
def backend(setup: Setup, name: str) -> Setup:
    """inductor generates kernels; aot_eager traces and partitions only; cudagraphs replays eager's as CUDA graphs."""
    if name == "inductor":
        return setup.did("backend", name)
    setup = setup.did("backend", name, options={**setup.options, "backend": name})
    return _with_graphs_marked(setup) if name == "cudagraphs" else setup


@knob("mode")
def mode(setup: Setup, name: str) -> Setup:
    """torch.compile takes a mode or options, not both; a mode is a set of options, so options it is.

    With CUDA graphs an output lives until the next step, which the script has to mark (torch.compiler documentation).
    """
    from torch._inductor import list_mode_options

    if setup.options.get("backend", "inductor") != "inductor":
        return setup.did("mode", "inductor's only")
    options = dict(list_mode_options(name))
    setup = setup.did("mode", name, options={**setup.options, **({"options": options} if options else {})})
    return _with_graphs_marked(setup) if name in CUDA_GRAPH_MODES else setup


def _with_graphs_marked(setup: Setup) -> Setup:
    steps = "call torch.compiler.cudagraph_mark_step_begin() before each step and clone a loss you keep"
    return replace(setup, yours={**setup.yours, "cuda_graphs": steps})


@knob("fullgraph")
def fullgraph(setup: Setup, on: bool) -> Setup:
    """A graph break becomes an error."""
    return setup.did("fullgraph", str(on).lower(), options={**setup.options, "fullgraph": on})


@knob("dynamic")
def dynamic(setup: Setup, name: str) -> Setup:
    """auto: static at first, symbolic where a second shape comes; true: symbolic at once; false: one graph a shape;
    marked: the length of sequences symbolic at once, and nothing else.
    """
    value = {"auto": None, "marked": None, "true": True, "false": False}[name]
    return setup.did("dynamic", name, options={**setup.options, "dynamic": value}, marks_lengths=name == "marked")


@knob("cache_size_limit")
def cache_size_limit(setup: Setup, limit: int) -> Setup:
    """How many graphs one frame may have before it runs eager; torch's newer name is recompile_limit.

    It is the whole process's, so it is set where something is compiled and not for an eager config.
    """
    return setup.did("cache_size_limit", str(limit), recompile_limit=limit)
