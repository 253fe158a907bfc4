"""Find out what this machine and this workload are before a study writes anything, and stop at what cannot work.

Raises WorkloadError for what the user has to mend and MachineFault for what the machine lacks.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from autocompile.failure_texts import CACHE_FOLDER
from autocompile.records import Stage
from autocompile.slice.classify import exception_chain
from autocompile.slice.environment import cpu_name, environment
from autocompile.slice.flops import matmul_flops_per_second
from autocompile.spec import Device, Facts, Method, Precision, PreflightRequest, Task, WorkloadSpec
from autocompile.workloads.job import Context, Job, MachineFault, lengths_of, prepare
from autocompile.workloads.precision import resolved_precision
from autocompile.workloads.zero import require_deepspeed

GIB = 1024**3
LEAST_CACHE_BYTES = GIB  # a search space's worth of compiled kernels
LEAST_EXTRA_BYTES = GIB  # a context, the libraries' workspaces and a few activations
CPU_PARAMETERS = 1_000_000_000  # more than these nobody means to train without a GPU


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the workload is, without regard to the machine."""

    layers: int
    parameters: int
    model_type: str | None
    task: Task | None
    method: Method
    regions: dict[str, str]
    frozen_knobs: dict[str, str]
    precision: Precision | None = None  # that a Trainer's arguments decide


def preflight(request: PreflightRequest, report: Callable[[Stage], None]) -> Facts:
    """The facts of a study, found in seconds: models are resolved without weights, only users' scripts are built."""
    report(Stage.PREFLIGHT)
    workload = request.workload
    check_cache_folder(Path(request.cache_folder))
    require_deepspeed(workload.parallel)
    targets = _targets(workload, request.devices)
    memory = [memory_of(target) for target in targets]  # before a script takes some of it
    report(Stage.BUILD)
    found = _script(workload, targets[0], request.seed) if workload.script else _model(workload)
    precision = found.precision or resolved_precision(workload, targets[0].type)
    if targets[0].type == "cpu":
        check_cpu_suits(workload, found.parameters)
    if workload.script is None:  # a script's model has been there already
        needed = needed_bytes(found.parameters, found.method, precision)
        name = f"{workload.model} ({found.method}, {precision})"
        for target, (free, total) in zip(targets, memory, strict=True):
            check_memory(name, target, free=free, total=total, needed=needed)
    report(Stage.COMPILE)
    compile_two_lines(targets[0])
    return Facts(
        devices=tuple(_device(target, total) for target, (_, total) in zip(targets, memory, strict=True)),
        layers=found.layers,
        parameters=found.parameters,
        environment=environment(targets[0], workload),
        model_type=found.model_type,
        task=found.task,
        method=found.method,
        precision=precision,
        regions=found.regions,
        frozen_knobs=found.frozen_knobs,
        free_memory_bytes=min(free for free, _ in memory),
        matmul_flops_per_second=matmul_flops_per_second(targets[0], precision),
    )


def check_cache_folder(folder: Path) -> None:
    """Compiled kernels are written there and loaded from there."""
    if complaint := _cache_complaint(folder):
        raise MachineFault(f"cache folder {folder}: {complaint}", subkind=CACHE_FOLDER)


def _cache_complaint(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error.strerror or str(error)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return "on a file system mounted noexec, which compiled kernels cannot use"
    free = shutil.disk_usage(folder).free
    return f"{free / GIB:.2f} GiB free on its disk, expected at least 1 GiB" if free < LEAST_CACHE_BYTES else None


def _targets(workload: WorkloadSpec, indices: tuple[int, ...]) -> list[torch.device]:
    """The GPUs asked for, or all that are visible, or the CPU where none is and none was asked for."""
    count = 0 if workload.device == "cpu" else torch.cuda.device_count()
    if workload.device == "cuda" and count == 0:
        raise MachineFault("device cuda: this machine has no GPU that torch can use (see nvidia-smi)")
    if workload.device != "cpu" and count < len(indices):
        raise MachineFault(f"GPUs {', '.join(map(str, indices))}: torch sees {count} of these (see nvidia-smi)")
    if count == 0:
        return [torch.device("cpu")]
    # A parent that made only these GPUs visible has renumbered them.
    chosen = indices if 0 < len(indices) < count else tuple(range(count))
    if max(chosen) >= count:
        raise MachineFault(f"GPU {max(chosen)}: this machine has {count}, numbered from 0")
    return [torch.device("cuda", index) for index in chosen]


def _model(workload: WorkloadSpec) -> Found:
    from autocompile.workloads.methods import require
    from autocompile.workloads.models import describe, resolved_method

    description = describe(workload)
    method = resolved_method(workload, description.parameters, description.task)
    require(method)
    lengths_of(workload, seed=0)  # so that a tokenizer which cannot be loaded shows before any trial
    return Found(
        layers=description.layers,
        parameters=description.parameters,
        model_type=description.model_type,
        task=description.task,
        method=method,
        regions=_regions(description.model, method),
        frozen_knobs={**_without_attention(description.model, workload.model), **_without_parts(description.model)},
    )


def _regions(model: nn.Module, method: Method) -> dict[str, str]:
    """Of the model that is built, whose adapters this one lacks: they come onto the linear layers of the blocks."""
    from autocompile.knobs import default_regions
    from autocompile.workloads.methods import block_linears

    adapters = {"lora": "linear layers of the blocks"} if method is not Method.FULL and block_linears(model) else {}
    return {**default_regions(model), **adapters}


def _without_attention(model: nn.Module, name: str | None) -> dict[str, str]:
    """No kernel can be chosen for a model that does not call scaled_dot_product_attention."""
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {} if found == "sdpa" else {"sdpa": f"{name} does not use scaled_dot_product_attention"}


def _without_parts(model: nn.Module) -> dict[str, str]:
    """Knobs that act on what this model does not have."""
    from autocompile.knobs.setup import has_convolutions, input_embedding

    found = {}
    if not has_convolutions(model):
        found["channels_last"] = "this model has no two-dimensional convolution"
    if input_embedding(model) is None:
        found["input_gradients"] = "this model names no input embedding"
    if torch.cuda.is_available() and find_spec("bitsandbytes") is None:
        found["optimizer"] = "moments in 8 bits need bitsandbytes: pip install 'torch-autocompile[qlora]'"
    return found


def _script(workload: WorkloadSpec, target: torch.device, seed: int) -> Found:
    from autocompile.workloads import scripts
    from autocompile.workloads.batches import first_batch
    from autocompile.workloads.training import fused_adamw

    assert workload.script is not None

    def build_for(micro_batch: int) -> Job:
        return prepare(Context.of(workload, {"micro_batch": micro_batch}, device=target, seed=seed), workload)

    job = build_for(scripts.MICRO_BATCHES[0])
    scripts.check_batches(job, workload.script)
    scripts.check_loss(job, workload.script)
    found = Found(
        layers=_layers(job),
        parameters=sum(parameter.numel() for parameter in job.model.parameters()),
        model_type=getattr(getattr(job.model, "config", None), "model_type", None),
        task=None,
        method=_method(job.model),
        regions=dict(job.regions),
        precision=job.precision if workload.trainer else None,
        frozen_knobs=_without_parts(job.model),
    )
    small = scripts.counted(job, first_batch(job), workload.script)
    del job
    gc.collect()  # modules hold each other in circles, and two models may not fit beside each other
    job = build_for(scripts.MICRO_BATCHES[1])
    large = scripts.counted(job, first_batch(job), workload.script)
    padding = {"padding": "the script pads its batches itself"} if workload.lengths else {}
    own = {"optimizer": "the script has an optimizer of its own"} if job.optimizer is not fused_adamw else {}
    frozen = {**found.frozen_knobs, **padding, **own, **scripts.frozen_knobs(workload.script, small, large)}
    return replace(found, frozen_knobs=frozen)


def _layers(job: Job) -> int:
    """Modules of the layer region; 0 where the model has no repeated part."""
    from autocompile.knobs.setup import Setup, modules_of

    return len(modules_of(Setup(model=job.model, regions=job.regions), "layer"))


def _method(model: nn.Module) -> Method:
    """A script says it by what its model is made of: adapters, 4-bit weights, or neither."""
    if not any("lora_" in name for name, _ in model.named_parameters()):
        return Method.FULL
    quantised = any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
    return Method.QLORA if quantised else Method.LORA


def check_cpu_suits(workload: WorkloadSpec, parameters: int) -> None:
    """A large model is trained on a CPU only by someone who says so."""
    if parameters > CPU_PARAMETERS and workload.device != "cpu":
        name = workload.model or workload.script
        raise MachineFault(f"{name}: needs a GPU, this machine has none (pass --device cpu to force it)")


def needed_bytes(parameters: int, method: Method, precision: Precision) -> int:
    """What no config of this workload does without: weights, gradients and Adam's two moments of what is trained."""
    mixed_or_full = precision in (Precision.BF16_MIXED, Precision.FP16_MIXED, Precision.FP32)
    per_parameter = {
        Method.FULL: 16.0 if mixed_or_full else 8.0,
        Method.LORA: 4.0 if precision is Precision.FP32 else 2.0,
        Method.QLORA: 0.5,  # embeddings and the head, which stay unquantised, come on top
    }[method]
    return round(parameters * per_parameter) + LEAST_EXTRA_BYTES


def memory_of(target: torch.device) -> tuple[int, int]:
    """Free and total bytes of the device; on a CPU what the container it runs in may use, if that is less."""
    if target.type == "cuda":
        try:
            return torch.cuda.mem_get_info(target)
        except RuntimeError as error:  # a full GPU has no room for the context that this asks in
            raise MachineFault(f"GPU {target.index}: CUDA cannot start on it: {str(error).splitlines()[0]}") from error
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return min(free, total), total


def check_memory(name: str, target: torch.device, *, free: int, total: int, needed: int) -> None:
    """Raises MachineFault for a device that is too small, or too full of something else."""
    if needed <= free:
        return
    where = f"GPU {target.index} ({torch.cuda.get_device_name(target)})" if target.type == "cuda" else "this machine"
    what = "is full" if needed <= total else "is too small"
    amounts = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    raise MachineFault(f"{where} {what}: {amounts}, {name} needs at least {needed / GIB:.1f} GiB")


def _device(target: torch.device, total: int) -> Device:
    if target.type == "cpu":
        return Device(type="cpu", uuid="cpu", name=cpu_name(), memory_bytes=total)
    properties = torch.cuda.get_device_properties(target)
    return Device(
        uuid=f"GPU-{str(properties.uuid).removeprefix('GPU-')}",
        name=properties.name,
        memory_bytes=total,
        capability=f"{properties.major}.{properties.minor}",
    )


def compile_two_lines(target: torch.device) -> None:
    """Forward and backward of a small function through inductor, so that a missing tool shows before any trial.

    On a CPU it also leaves the probe of vector instructions in inductor's cache folder, which takes longer than many
    a compile; a copy of the folder spares later processes that.
    """

    # Imported here, as is all of dynamo: its import fails in obscure ways where the cache folder is broken.
    from torch._inductor.cpp_builder import get_cpp_compiler

    def two_lines(values: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(values)
        return (waves * values).sum()

    values = torch.ones(64, device=target, requires_grad=True)
    try:
        if target.type == "cpu":
            get_cpp_compiler()  # with a warm cache folder, what follows would not miss it
        torch.compile(two_lines)(values).backward()
    except (RuntimeError, OSError) as error:
        if any(type(link).__name__ == "GPUTooOldForTriton" for link in exception_chain(error)):
            return  # every slice that compiles will say so, and eager training can still be tuned
        complaint = tool_complaint(error)
        if complaint is None:
            raise
        raise MachineFault(complaint) from error


def tool_complaint(error: BaseException) -> str | None:
    """What the user can install or set, if that is what the compile failed for; the true cause is often nested."""
    compiler = os.environ.get("CXX")
    for link in exception_chain(error):
        if type(link).__name__ == "InvalidCxxCompiler" or (
            compiler is not None and getattr(link, "filename", None) == compiler
        ):
            setting = f" (now CXX={compiler})" if compiler is not None else ""
            return f"no working C++ compiler: install g++ or set CXX{setting}"
        match type(link).__name__:
            case "CppCompileError":
                complaints = [line for line in str(link).splitlines() if "error: " in line]
                return f"the C++ compiler cannot build torch's kernels: {(complaints or ['it says nothing'])[0]}"
            case "TritonMissing":
                return "no working triton: install the one that belongs to this torch"
        if "Failed to find C compiler" in str(link):
            return "no working C compiler for triton: install gcc or set CC"
    return None
