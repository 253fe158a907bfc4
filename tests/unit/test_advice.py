"""What is advised for what a trial showed: each cause, its line or knob, and the command that tries it."""

from __future__ import annotations

import shlex
from typing import get_args

import pytest
from typer.main import get_command

from autocompile.cli import app
from autocompile.records import (
    Compile,
    CudagraphSkip,
    Degradation,
    EagerFrame,
    Failed,
    Failure,
    FailureKind,
    GpuState,
    GraphBreak,
    Measured,
    Measurement,
    Recompile,
    Region,
    Result,
    Stage,
    State,
    StepSeconds,
    Stopped,
    Telemetry,
    TrialRecord,
    Verdict,
)
from autocompile.report import Study
from autocompile.report.advice import RULES, advice
from autocompile.report.advice.command import _FLAGS, tune_command
from autocompile.report.advice.guards import Guard, kind_of, line_of, readable, source_of
from autocompile.report.document import Places
from autocompile.report.explain import explain
from autocompile.settings import Settings, study_spec
from autocompile.space import defaults, load_space
from autocompile.spec import Device, Facts, LoraSpec, Method, Precision, Role, StudySpec, Task, WorkloadSpec
from tests.unit.search_cases import config, spec

EAGER = {**defaults(), "micro_batch": 8}
LAYER = {**EAGER, "scope": "layer"}
MODEL = {**EAGER, "scope": "model"}
GRAPHS = {**LAYER, "mode": "reduce-overhead"}
SPEC = StudySpec(
    workload=WorkloadSpec(model="llama2-7b", method=Method.LORA, precision=Precision.BF16, sequence_length=512),
    space=load_space("quick"),
)
SCRIPT = SPEC.model_copy(update={"workload": WorkloadSpec(script="train.py:build", device="cpu")})
FACTS = Facts(
    devices=(Device(uuid="GPU-1", name="NVIDIA H200", memory_bytes=1 << 37, capability="9.0"),),
    layers=32,
    parameters=6_738_415_616,
    environment={"torch": "2.11.0"},
    method=Method.LORA,
    precision=Precision.BF16,
)
CPU = FACTS.model_copy(update={"devices": (Device(type="cpu", uuid="cpu", name="CPU", memory_bytes=1 << 34),)})

SIZE = "0/0: tensor 'args[0]' size mismatch at index 1. expected 64, actual 96"
INDEX = (
    "0/1: module.index == 1                                        # if self.index % 2:  # examples/faults.py:26 in "
    "forward (HINT: torch.compile considers integer attributes of the nn.Module to be static. If you are observing "
    "recompilation, you might want to make this integer dynamic using torch._dynamo.config...)"
)
LIMIT = "Dynamo recompile limit exceeded: Dynamo attempted to recompile the code object too many times"
FLASH = "_scaled_dot_product_flash_attention"


def measured(config, *, degraded=(), number=1, data_wait=None, limits=(), stopped=None, **telemetry):
    found = Measurement(
        tokens_per_second=1000.0,
        step_seconds=StepSeconds(median=0.1, low=0.1, high=0.1, n=20),
        compile=Compile(seconds=13, cold_seconds=13, cache="cold"),
        data_wait_seconds=data_wait,
        gpu=GpuState(sm_clock_mhz=1980, power_watts=690.0, temperature_celsius=64, limits=limits),
        degraded=degraded,
    )
    outcome = Measured(measurement=found, telemetry=Telemetry(**{"compile_applied": "all", **telemetry}))
    return record(number, config, State.COMPLETE, outcome=outcome)


def failed(config, kind, *, message="it went wrong", where=None, subkind=None, number=1, **telemetry):
    failure = Failure(kind=kind, stage=Stage.WARMUP, message=message, where=where, subkind=subkind)
    return record(number, config, State.PRUNED, outcome=Failed(failure=failure, telemetry=Telemetry(**telemetry)))


def record(number, config, state, **more):
    return TrialRecord(number=number, role=Role.SEARCH, state=state, config=dict(config), **more)


def study(*records, spec=SPEC, facts=FACTS):
    return Study(
        name="mine",
        spec=spec,
        facts=facts,
        records=records,
        derived=(),
        verdict=Verdict(result=Result.NONE, confirmed=False),
        used_seconds=1.0,
        total_seconds=None,
    )


def recompiles(*guards, where="layer:Block"):
    return {"recompiles": tuple(Recompile(where=where, guard=guard) for guard in guards)}


def hit(*guards, modules=12):
    """A limit that was hit for these guards."""
    regions = (Region(name="layer:Block", modules=modules, graphs=8),)
    frames = (EagerFrame(where="layer:Block", reason=LIMIT),)
    return {**recompiles(*guards), "regions": regions, "eager_frames": frames}


def broken(reason, where="job.py:7"):
    return {"graph_breaks": (GraphBreak(where=where, reason=reason),), "degraded": ("graph_breaks",)}


def skipped(reason):
    return {"cudagraph_skips": (CudagraphSkip(reason=reason),), "degraded": ("cudagraph_skipped",)}


ACCUMULATING = SPEC.model_copy(update={"workload": SPEC.workload.model_copy(update={"global_batch": 32})})
NO_GRAPHS = "default or max-autotune-no-cudagraphs"
K = FailureKind

# trial, cause, text of what was seen or is to be changed, settings of the command
CASES = [
    pytest.param(
        failed(LAYER, K.RECOMPILE_STORM, **hit(INDEX)),
        *("recompile_limit", "raise cache_size_limit", "scope=layer cache_size_limit=64 micro_batch=8"),
        id="a limit that one guard of equal modules hits",
    ),
    pytest.param(
        failed({**LAYER, "cache_size_limit": 64}, K.RECOMPILE_STORM, **hit(SIZE)),
        *("recompile_limit", "its 64 graphs", "scope=layer cache_size_limit=256 micro_batch=8"),
        id="a high limit that is hit",
    ),
    pytest.param(
        failed(LAYER, K.RECOMPILE_STORM, **hit(INDEX, modules=1)),
        *("endless_recompiles", "would only be hit later", None),
        id="a number that a single module changes at each step",
    ),
    pytest.param(
        failed(LAYER, K.RECOMPILE_STORM, **hit(INDEX)),
        *("integer_attribute", "module.index, read at examples/faults.py:26", None),
        id="an integer of the module, with the line that reads it",
    ),
    pytest.param(
        failed(LAYER, K.RECOMPILE_STORM, message="still compiling after 60 steps"),
        *("recompile_storm", "still compiling", None),
        id="a storm without a limit",
    ),
    pytest.param(
        measured({**LAYER, "dynamic": "false"}, **recompiles(SIZE)),
        *("sizes", "pad or bucket", "scope=layer dynamic=auto micro_batch=8"),
        id="one graph for each size",
    ),
    pytest.param(
        measured(LAYER, **recompiles(SIZE)),
        *("sizes", "mark_dynamic on the sequence dimension", "scope=layer dynamic=true micro_batch=8"),
        id="a second size makes it symbolic",
    ),
    pytest.param(
        measured(GRAPHS, **recompiles(SIZE)),
        *("sizes_under_cuda_graphs", NO_GRAPHS, "scope=layer mode=default micro_batch=8"),
        id="each size is recorded",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: tensor 'args[0]' requires_grad mismatch. expected requires_grad=0")),
        *("input_gradients", "model.enable_input_require_grads()", None),
        id="the first layer of LoRA",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: GLOBAL_STATE changed: grad_mode ")),
        *("mode_switch", "grad_mode changed", None),
        id="evaluation within training",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: GLOBAL_STATE changed: autocast(cuda)_enabled ")),
        *("process_setting", "enter autocast", None),
        id="autocast around some steps",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: tensor 'x' dtype mismatch. expected Float, actual Double")),
        *("input_type", "one dtype", None),
        id="another dtype",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: tensor 'x' stride mismatch at index 0. expected 4, actual 1")),
        *("input_layout", ".contiguous()", None),
        id="another layout",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/1: len(module.seen) == 1      # self.seen.append(1)  # job.py:8 in forward")),
        *("growing_container", "module.seen held more or less, read at job.py:8", None),
        id="a list that grows",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: ___check_obj_id(L['self'].processor, 140462015041104), type=<class 'X'>")),
        *("other_object", "L['self'].processor", None),
        id="an object of each layer",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: module.scale == 0.5      # return x * self.scale  # job.py:9 in forward")),
        *("python_value", "module.scale, read at job.py:9", None),
        id="a number that changes",
    ),
    pytest.param(
        measured(LAYER, **recompiles("0/0: something nobody has seen yet")),
        *("other_guard", "something nobody has seen yet", None),
        id="a guard of an unknown kind",
    ),
    pytest.param(
        failed({**LAYER, "fullgraph": True}, K.GRAPH_BREAK, message="Data-dependent branching", where="job.py:7"),
        *("fullgraph", "(job.py:7)", "scope=layer fullgraph=false micro_batch=8"),
        id="a break that fullgraph refuses",
    ),
    pytest.param(
        failed({**LAYER, "fullgraph": True}, K.GRAPH_BREAK, message="Data-dependent branching", where="job.py:7"),
        *("break_at_a_branch", "torch.where", None),
        id="the line of such a break",
    ),
    pytest.param(
        measured(LAYER, **broken("Data-dependent branching")),
        *("break_at_a_branch", "job.py:7: Data-dependent branching", None),
        id="a branch on a tensor's value",
    ),
    pytest.param(
        measured(LAYER, **broken("Unsupported Tensor.item() call with capture_scalar_outputs=False")),
        *("break_at_a_scalar", "capture_scalar_outputs = True", None),
        id="item()",
    ),
    pytest.param(
        measured(LAYER, **broken("Dynamic shape operator: Operator `aten.nonzero.default`'s output shape depends")),
        *("break_at_a_data_dependent_shape", "capture_dynamic_output_shape_ops", None),
        id="a boolean index",
    ),
    pytest.param(
        measured(LAYER, **broken("Failed to trace builtin operator: ... builtin operator `print` with ...")),
        *("break_at_output", "outside forward", None),
        id="print",
    ),
    pytest.param(
        measured(LAYER, **broken("Skip calling `torch.compiler.disable()`d function")),
        *("break_on_request", "take torch.compiler.disable", None),
        id="torch.compiler.disable",
    ),
    pytest.param(
        measured(MODEL, **broken("requires_grad_() intermediate leaked as output")),
        *("break_at_requires_grad", "compiled per layer", "scope=layer micro_batch=8"),
        id="LoRA with checkpointing in a whole-model trace",
    ),
    pytest.param(
        measured(LAYER, **broken("Attempted to call function marked as skipped")),
        *("graph_break", "torch.library.custom_op", None),
        id="any other break",
    ),
    pytest.param(
        measured(LAYER, eager_frames=(EagerFrame(where="job.py:3", reason="backend='x' raised: ValueError: no"),)),
        *("suppressed_error", "suppress_errors", None),
        id="a compiler that failed without a word",
    ),
    pytest.param(
        measured(LAYER, regions=(Region(name="layer:Block", modules=12, graphs=0, calls=0),), compile_applied="none"),
        *("never_called", "let loss call the model it is given", None),
        id="a region that nobody called",
    ),
    pytest.param(
        measured({**LAYER, "scope": "*.drop"}, compile_applied="none", degraded=("partial_eager",)),
        *("nothing_compiled", "scope=*.drop was asked for and nothing was compiled", "scope=layer micro_batch=8"),
        id="nothing to compile",
    ),
    pytest.param(
        measured(GRAPHS, degraded=("graph_breaks",)),
        *("unexplained", "flagged graph breaks", None),
        id="a flag without its reason",
    ),
    pytest.param(
        measured(GRAPHS, **skipped("skipping cudagraphs due to mutated inputs (1 instances) at job.py:5")),
        *("cudagraph_input_mutated", "at job.py:5", "scope=layer mode=default micro_batch=8"),
        id="an input changed in place",
    ),
    pytest.param(
        measured(
            {**GRAPHS, "mode": "max-autotune"}, **skipped("skipping cudagraphs due to cpu device (arg1_1) at job.py:6")
        ),
        *("cudagraph_cpu_tensor", "on the GPU", "scope=layer mode=max-autotune-no-cudagraphs micro_batch=8"),
        id="a tensor on the CPU",
    ),
    pytest.param(
        measured(GRAPHS, **skipped("skipping cudagraphs due to dynamic shapes")),
        *("cudagraph_sizes", "dynamic=false", "scope=layer mode=default micro_batch=8"),
        id="symbolic sizes",
    ),
    pytest.param(
        measured(GRAPHS, **skipped("skipping cudagraph due to function 3 exceeding max re-recording limit (=128)")),
        *("cudagraph_addresses", "copy_", "scope=layer mode=default micro_batch=8"),
        id="inputs that move",
    ),
    pytest.param(
        measured(GRAPHS, **skipped("skipping cudagraphs due to deterministic index put")),
        *("cudagraph_skipped", NO_GRAPHS, "scope=layer mode=default micro_batch=8"),
        id="any other reason",
    ),
    pytest.param(
        failed(GRAPHS, K.COMPILE_ERROR, subkind="cudagraph_liveness"),
        *("cudagraph_output_overwritten", NO_GRAPHS, "scope=layer mode=default micro_batch=8"),
        id="an output overwritten",
    ),
    pytest.param(
        failed({**GRAPHS, "gradient_checkpointing": True}, K.COMPILE_ERROR, subkind="cudagraph_checkpoint"),
        *("cudagraphs_with_checkpointing", NO_GRAPHS, "mode=default micro_batch=8 gradient_checkpointing=true"),
        id="CUDA graphs and checkpointing",
    ),
    pytest.param(
        failed({**LAYER, "gradient_checkpointing": True}, K.COMPILE_ERROR, subkind="checkpoint_mismatch"),
        *("checkpoint_mismatch", "raise cache_size_limit", "cache_size_limit=64"),
        id="another graph in the recomputation",
    ),
    pytest.param(
        failed(MODEL, K.COMPILE_ERROR, message="InductorError: LoweringException"),
        *("compile_error", "a bug in the compiler", "scope=layer micro_batch=8"),
        id="a bug in the compiler",
    ),
    pytest.param(
        failed(MODEL, K.COMPILE_TIMEOUT),
        *("compile_timeout", "larger --budget", "scope=layer micro_batch=8"),
        id="a whole model takes too long",
    ),
    pytest.param(
        failed({**LAYER, "mode": "max-autotune"}, K.COMPILE_TIMEOUT),
        *("compile_timeout", "mode=default", "scope=layer mode=default micro_batch=8"),
        id="autotuning takes too long",
    ),
    pytest.param(
        failed(LAYER, K.COMPILE_TIMEOUT),
        *("compile_timeout", "larger --budget", None),
        id="the least compile takes too long",
    ),
    pytest.param(
        failed({**MODEL, "sdpa": "flash"}, K.BACKEND_UNSUPPORTED, subkind="sdpa"),
        *("causal_mask", "materialises the causal mask", "scope=layer sdpa=flash micro_batch=8"),
        id="forced flash in a whole-model trace",
    ),
    pytest.param(
        failed({**LAYER, "sdpa": "efficient"}, K.BACKEND_UNSUPPORTED, subkind="sdpa", message="(Memory Efficient ...)"),
        *("sdpa_unsupported", "(Memory Efficient ...)", "scope=layer sdpa=auto micro_batch=8"),
        id="a kernel that cannot run, with torch's reason",
    ),
    pytest.param(
        failed(LAYER, K.BACKEND_UNSUPPORTED, subkind="gpu_too_old"),
        *("gpu_too_old", "leave compile off", None),
        id="an old GPU",
    ),
    pytest.param(
        failed({**LAYER, "sdpa": "cudnn"}, K.BACKEND_UNSUPPORTED),
        *("backend_unsupported", "sdpa=auto", "scope=layer sdpa=auto micro_batch=8"),
        id="another backend",
    ),
    pytest.param(
        measured({**LAYER, "sdpa": "math"}, sdpa_kernels=(FLASH,)),
        *("another_kernel", f"sdpa=math was asked for and {FLASH} ran", "scope=layer sdpa=auto micro_batch=8"),
        id="flash instead of math",
    ),
    pytest.param(
        failed(GRAPHS, K.NUMERICS_MISMATCH, message="gradients off by 0.75, limit 1e-5"),
        *("numerics_mismatch", "never train with this config", "scope=layer mode=default micro_batch=8"),
        id="wrong gradients under CUDA graphs",
    ),
    pytest.param(
        failed(LAYER, K.OOM),
        *("oom", "gradient_checkpointing=true", "scope=layer micro_batch=4"),
        id="out of memory",
    ),
    pytest.param(
        failed({**LAYER, "micro_batch": 1}, K.OOM),
        *("oom", "halve micro_batch", "scope=layer micro_batch=1 gradient_checkpointing=true"),
        id="out of memory with the smallest batch",
    ),
    pytest.param(
        measured(LAYER, degraded=("tight_memory",)),
        *("tight_memory", "--memory-headroom", "scope=layer micro_batch=4"),
        id="too little left free",
    ),
    pytest.param(failed(LAYER, K.HOST_OOM), "host_oom", "TORCHINDUCTOR_COMPILE_THREADS=1", None, id="the host is full"),
    pytest.param(failed(LAYER, K.HANG), "hang", "log.txt", None, id="a hang"),
    pytest.param(
        failed(GRAPHS, K.GPU_FAULT),
        *("gpu_fault", "Xid", "scope=layer mode=default micro_batch=8"),
        id="an illegal access",
    ),
    pytest.param(
        failed(LAYER, K.WORKLOAD_ERROR, where="job.py:3"), "workload_error", "(job.py:3)", None, id="the user's line"
    ),
    pytest.param(failed(LAYER, K.INFRASTRUCTURE), "infrastructure", "autocompile doctor", None, id="the machine"),
    pytest.param(failed(LAYER, K.UNKNOWN), "unknown", "autocompile.slice FOLDER", None, id="nobody knows"),
    pytest.param(
        measured({**LAYER, "dynamic": "true"}),
        *("dynamic", "only takes longer", "scope=layer dynamic=auto micro_batch=8"),
        id="symbolic sizes for a single size",
    ),
    pytest.param(
        measured(LAYER, degraded=("throttled",), limits=("hw_thermal_slowdown",)),
        *("throttled", "hw_thermal_slowdown", None),
        id="a hot GPU",
    ),
    pytest.param(measured(LAYER, degraded=("disturbed",)), "disturbed", "--gpus", None, id="a shared GPU"),
    pytest.param(measured(LAYER, data_wait=0.04), "data_bound", "40% of a step", None, id="a step that waits for data"),
    pytest.param(
        record(1, LAYER, State.FAIL, stopped=Stopped(reason="budget", bound=9)),
        *("budget", "larger --budget", None),
        id="no time left",
    ),
]


@pytest.mark.parametrize(("trial", "cause", "text", "settings"), CASES)
def test_each_cause_has_its_advice(trial, cause, text, settings):
    found = {one.cause: one for one in advice(trial, study(trial))}
    assert cause in found, list(found)
    one = found[cause]
    assert text in f"{one.what} / {one.change}"
    if settings is None:
        assert one.command is None
    else:
        pins = " ".join(f"--set {word}" for word in settings.split())
        assert one.command is not None and pins in one.command, one.command
        assert one.command.startswith("autocompile tune --model llama2-7b --method lora --precision bf16 --seq-len 512")


OTHERS = {  # causes that take more than one trial or another study
    "cudagraphs_with_accumulation",
    "causal_mask_slows_attention",
    "cudagraphs_without_a_gpu",
}


def test_every_row_of_the_tables_is_tested_above():
    causes = [rule.cause for rule in RULES]
    assert len(set(causes)) == len(causes)
    assert {case.values[1] for case in CASES} | OTHERS == set(causes)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_no_failure_is_without_advice(kind):
    trial = failed(LAYER, kind)
    assert advice(trial, study(trial))


@pytest.mark.parametrize("name", get_args(Degradation))
def test_no_flag_is_without_advice(name):
    trial = measured(LAYER, degraded=(name,))
    assert advice(trial, study(trial))


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(measured(LAYER, regions=(Region(name="layer:Block", modules=12, graphs=1, calls=9),)), id="whole"),
        pytest.param(measured(EAGER, compile_applied="none", sdpa_kernels=(FLASH,)), id="eager"),
        pytest.param(measured({**LAYER, "sdpa": "flash"}, sdpa_kernels=(FLASH, "flash_fwd_kernel")), id="kernel"),
        pytest.param(
            measured({**LAYER, "sdpa": "cudnn"}, sdpa_kernels=("cudnn_generated_fort_native_sdpa_sm90_flash_fprop",)),
            id="cuDNN's kernel has flash in its name",
        ),
        pytest.param(measured(GRAPHS), id="CUDA graphs without accumulation"),
        pytest.param(measured(LAYER, data_wait=0.001), id="a short wait"),
        pytest.param(record(1, LAYER, State.RUNNING), id="running"),
        pytest.param(record(1, LAYER, State.FAIL, stopped=Stopped(reason="interrupted")), id="interrupted"),
        pytest.param(
            measured(LAYER, **recompiles("3/0: ___stack1 == 0.5      # y = x.item()  # job.py:2 in forward")),
            id="a guard that follows from a break",
        ),
    ],
)
def test_nothing_is_advised_where_nothing_went_wrong(trial):
    assert advice(trial, study(trial)) == []


def test_a_broken_off_compile_is_no_graph_break():
    frames = (EagerFrame(where="job.py:3", reason="OutOfMemoryError: CUDA out of memory"),)
    trial = failed(LAYER, K.OOM, eager_frames=frames)
    assert [one.cause for one in advice(trial, study(trial))] == ["oom"]


def test_cuda_graphs_without_a_gpu():
    trial = measured(GRAPHS, **skipped("inductor gave no reason"))
    (one,) = advice(trial, study(trial, facts=CPU))
    assert one.cause == "cudagraphs_without_a_gpu"
    assert one.command is not None and "--set mode=default" in one.command


def test_accumulation_under_cuda_graphs():
    trial = measured(GRAPHS)
    (one,) = advice(trial, study(trial, spec=ACCUMULATING))
    assert one.cause == "cudagraphs_with_accumulation"
    assert "gradients of 4 micro-batches" in one.what
    assert "max-autotune-no-cudagraphs" in one.change
    assert one.command is not None and "--global-batch 32" in one.command and "mode=default" in one.command


@pytest.mark.parametrize(
    ("ran", "elsewhere", "slow"),
    [
        pytest.param(("_scaled_dot_product_efficient_attention",), (FLASH,), True, id="efficient instead of flash"),
        pytest.param((FLASH,), (FLASH,), False, id="flash in both"),
        pytest.param(("_scaled_dot_product_efficient_attention",), (), False, id="nobody knows better"),
        pytest.param((f"{FLASH}_for_cpu",), (f"{FLASH}_for_cpu",), False, id="a CPU's flash takes masks"),
    ],
)
def test_a_whole_model_trace_is_blamed_where_others_run_a_faster_kernel(ran, elsewhere, slow):
    trial, other = measured(MODEL, sdpa_kernels=ran), measured(EAGER, number=0, sdpa_kernels=elsewhere)
    found = [one for one in advice(trial, study(other, trial)) if one.cause == "causal_mask_slows_attention"]
    assert bool(found) is slow
    assert all("--set scope=layer" in (one.command or "") for one in found)


@pytest.mark.parametrize(
    ("others", "advised"),
    [
        pytest.param([], False, id="a script may have any sizes"),
        pytest.param([measured(LAYER, number=0)], True, id="the same scope met one size"),
        pytest.param([measured(LAYER, number=0, **recompiles(SIZE))], False, id="the same scope met two"),
        pytest.param([measured(MODEL, number=0)], False, id="another scope says nothing"),
    ],
)
def test_dynamic_of_a_script_is_judged_by_its_other_trials(others, advised):
    trial = measured({**LAYER, "dynamic": "true"})
    assert bool(advice(trial, study(*others, trial, spec=SCRIPT))) is advised


def test_a_frozen_knob_is_not_advised():
    trial = failed(LAYER, K.OOM)
    facts = CPU.model_copy(update={"frozen_knobs": {"micro_batch": "its batches do not grow"}})
    assert advice(trial, study(trial, facts=facts))[0].command is None


def test_the_trial_that_did_what_is_advised_is_named():
    trial, smaller = failed(LAYER, K.OOM), measured({**LAYER, "micro_batch": 4}, number=5)
    assert advice(trial, study(trial, smaller))[0].change.endswith("; trial 5 measured that")


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(SPEC.workload, id="a model"),
        pytest.param(
            WorkloadSpec(
                script="my job.py:build",
                device="cpu",
                global_batch=16,
                mask="padding",
                lora=LoraSpec(r=64, dropout=0.1),
                weights=True,
                options={"fault": "wrong when compiled", "depth": 3, "word": "8", "on": True, "pattern": "*.x"},
            ),
            id="a script with options of every type",
        ),
        pytest.param(
            WorkloadSpec(
                model="tiny-bert",
                task=Task.CLASSIFICATION,
                lengths="uniform:8-64",
                sequence_length=64,
                eval_every=3,
                mask="ones",
            ),
            id="lengths, a task and evaluation",
        ),
        pytest.param(WorkloadSpec(model="tiny-vit", image_size=64), id="images"),
        pytest.param(WorkloadSpec(script="job.py:make", trainer="hf"), id="a Trainer"),
    ],
)
def test_the_command_asks_for_the_same_workload(workload):
    spec = SPEC.model_copy(update={"workload": workload, "pinned": {"sdpa": "auto"}})
    words = shlex.split(tune_command(spec, LAYER, {"dynamic": "true", "mode": "default"}))
    assert words[:2] == ["autocompile", "tune"]
    parsed = get_command(app).commands["tune"].make_context("tune", words[2:]).params
    flags = {name: parsed[name] for name in Settings.__dataclass_fields__}
    asked = study_spec(Settings(**{name: value for name, value in flags.items() if value is not None}))
    assert asked.workload == workload
    assert asked.pinned == {"scope": "layer", "mode": "default", "dynamic": "true", "sdpa": "auto", "micro_batch": 8}


def test_the_command_asks_for_the_way_to_train_of_its_config():
    workload = {"parallel": "auto", "gpus_per_trial": 2, "global_batch": 8}
    command = tune_command(spec(workload=workload), config(scope="layer", parallel="zero2"), {})
    assert "--global-batch 8 --parallel zero2 --gpus-per-trial 2" in command
    assert "parallel=" not in command
    alone = tune_command(spec(workload=workload), config(scope="layer"), {})
    assert "--parallel" not in alone and "--gpus-per-trial" not in alone


def test_the_command_can_ask_for_every_field_of_a_workload():
    given_by_set = {"mask", "lora", "options"}
    of_a_file = {"deepspeed_config"}
    assert set(_FLAGS) | given_by_set | of_a_file == set(WorkloadSpec.model_fields)


@pytest.mark.parametrize(
    ("guard", "kind", "source", "line"),
    [
        pytest.param(SIZE, Guard.SIZE, "dimension 1 of args[0]", None, id="a size"),
        pytest.param(
            "0/1: 2 <= L['x'].size()[0]  # return F.linear(input)  # nn/linear.py:134 in forward (user code shown...)",
            *(Guard.SIZE, "dimension 0 of L['x']", "nn/linear.py:134"),
            id="a size that was 1",
        ),
        pytest.param(INDEX, Guard.INTEGER, "module.index", "examples/faults.py:26", id="an integer of a module"),
        pytest.param(
            "2/1: L['self'].layer_idx == 7   # if self.training:  # a.py:3 in forward (HINT: torch.compile considers "
            "integer attributes of the nn.Module to be static.",
            *(Guard.INTEGER, "L['self'].layer_idx", "a.py:3"),
            id="as older versions write it",
        ),
        pytest.param(
            "0/0: module.flag == True      # if self.training and self.flag:  # a.py:3 in forward",
            *(Guard.VALUE, "module.flag", "a.py:3"),
            id="what else stands in the line does not count",
        ),
        pytest.param(
            "0/0: not ___dict_contains('mask', kwargs)      # if mask in kwargs:  # a.py:3 in forward",
            *(Guard.CONTAINER, "kwargs", "a.py:3"),
            id="another argument",
        ),
    ],
)
def test_guards_are_read_from_their_text(guard, kind, source, line):
    assert (kind_of(guard), source_of(guard), line_of(guard)) == (kind, source, line)


def test_a_guard_in_one_line_has_nothing_of_this_process():
    text = "0/0: ___check_type_id(module.linear, 94162976274784), type=<class 'Linear'>   # x  # a.py:3 in forward"
    assert readable(text) == "___check_type_id(module.linear), type=<class 'Linear'> # x # a.py:3 in forward"
    assert "HINT" not in readable(INDEX)


def test_each_cause_is_told_once_and_names_its_trials():
    records = (
        measured(EAGER, number=0, compile_applied="none"),
        failed(LAYER, K.RECOMPILE_STORM, number=1, **hit(INDEX)),
        failed({**LAYER, "fullgraph": True}, K.RECOMPILE_STORM, number=2, **hit(INDEX)),
        failed({**LAYER, "micro_batch": 64}, K.OOM, number=3, message="wanted 2 GiB"),
        failed({**LAYER, "micro_batch": 32}, K.OOM, number=4, message="wanted 3 GiB"),
    )
    text = explain(study(*records), Places())
    assert "trial 1, search: layer" in text
    assert "trial 3, search: layer micro_batch=64" in text
    assert "trial 2, search" not in text and "trial 4, search" not in text and "trial 0," not in text
    assert text.count("allow_unspec_int_on_nn_module") == 1
    assert "read at examples/faults.py:26 (trials 1, 2)" in text
    assert "wanted 2 GiB (trials 3, 4)" in text
    assert "change       halve micro_batch" in text


def test_one_trial_is_told_whole():
    trial = measured(
        GRAPHS,
        graphs=2,
        regions=(Region(name="layer:Block", modules=32, graphs=2, calls=640),),
        sdpa_kernels=(FLASH,),
        sdpa_applied="no",
        mask="none",
        degraded=("throttled",),
        limits=("sw_power_cap", "hw_thermal_slowdown"),
        data_wait=0.001,
        **recompiles(SIZE, SIZE.replace("96", "128")),
    )
    text = explain(study(trial), Places(), 1)
    for line in (
        "  asked        scope=layer mode=reduce-overhead micro_batch=8, every other knob at its default",
        "  compiled     all: 2 graphs; 13 s of compile with a cache that was cold",
        "  region       layer:Block: 32 modules, 2 graphs, 640 calls",
        "  compiler     recompile of layer:Block: tensor 'args[0]' size mismatch at index 1. expected 64, actual 96",
        "(and 1 more)",
        "  CUDA graphs  none was skipped",
        f"  attention    {FLASH} (torch's choice), mask none",
        "  GPU          1980 MHz, 690 W, 64 C, clock held down by sw_power_cap, hw_thermal_slowdown",
        "  data         1.0 ms of a step (1%) spent waiting for its batch",
        "  flags        throttled",
        "    try          autocompile tune",
    ):
        assert line in text, text


def test_paths_are_relative_but_commands_run():
    spec = SPEC.model_copy(update={"workload": WorkloadSpec(script="/data/ann/job.py:build")})
    trial = failed(LAYER, K.OOM, where="/data/ann/job.py:3")
    text = explain(study(trial, spec=spec), Places(folders=("/data/ann",)))
    assert "(job.py:3)" in text
    assert "try          autocompile tune --workload /data/ann/job.py:build" in text
