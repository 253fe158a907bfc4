"""Advice where a slice failed, or measured something else than its config in peace."""

from __future__ import annotations

from autocompile.records import FailureKind
from autocompile.report.advice import changes, seen
from autocompile.report.advice.rule import Rule
from autocompile.report.advice.seen import failed, flag

_KNOWN_ERRORS = ("cudagraph_liveness", "cudagraph_checkpoint", "checkpoint_mismatch")

FAILURES = (
    Rule(
        cause="checkpoint_mismatch",
        seen=failed(FailureKind.COMPILE_ERROR, "checkpoint_mismatch"),
        change="the recomputation took another graph than the forward: raise cache_size_limit so that neither falls "
        "back to eager, keep sizes fixed, or switch checkpointing off",
        sets=changes.higher_limit,
    ),
    Rule(
        cause="compile_error",
        seen=failed(FailureKind.COMPILE_ERROR, but=lambda case: case.failure and case.failure.subkind in _KNOWN_ERRORS),
        change="most often a bug in the compiler: a smaller scope or mode=default goes around it; the trial's log.txt "
        "has the whole text for a report to PyTorch",
        sets=changes.less_compile,
        each=True,
    ),
    Rule(
        cause="compile_timeout",
        seen=failed(FailureKind.COMPILE_TIMEOUT),
        change="compile less: scope=layer instead of model, mode=default instead of an autotuned one, dynamic=auto; or "
        "give a larger --budget",
        sets=changes.less_compile,
    ),
    Rule(
        cause="causal_mask",
        seen=seen.mask_instead_of_flash,
        change="compile per layer, where attention keeps is_causal, or leave the kernel to torch (sdpa=auto)",
        sets=changes.to(scope="layer"),
    ),
    Rule(
        cause="causal_mask_slows_attention",
        seen=seen.slower_attention_in_a_whole_model_trace,
        change="compile per layer: a whole-model trace materialises the causal mask, which flash and cuDNN do without",
        sets=changes.to(scope="layer"),
    ),
    Rule(
        cause="sdpa_unsupported",
        seen=failed(FailureKind.BACKEND_UNSUPPORTED, "sdpa", but=seen.forced_flash_in_a_whole_model_trace),
        change="leave the kernel to torch (sdpa=auto), or try another of flash, cudnn, efficient and math; torch gave "
        "the reason above",
        sets=changes.to(sdpa="auto"),
    ),
    Rule(
        cause="gpu_too_old",
        seen=failed(FailureKind.BACKEND_UNSUPPORTED, "gpu_too_old"),
        change="triton does not support this GPU: leave compile off here",
    ),
    Rule(
        cause="backend_unsupported",
        seen=failed(FailureKind.BACKEND_UNSUPPORTED, but=lambda case: case.failure and case.failure.subkind),
        change="leave to torch what was forced: sdpa=auto, mode=default",
        sets=changes.to(sdpa="auto"),
        each=True,
    ),
    Rule(
        cause="another_kernel",
        seen=seen.another_kernel_ran,
        change="the figures are those of the kernel that ran; ask for that one or for sdpa=auto",
        sets=changes.to(sdpa="auto"),
        each=True,
    ),
    Rule(
        cause="numerics_mismatch",
        seen=failed(FailureKind.NUMERICS_MISMATCH),
        change="never train with this config: it computes something else than eager does. Without CUDA graphs or with "
        "sdpa=auto the same scope may be right; compiling attention and mlp alone finds the part that is wrong, which "
        "PyTorch wants to hear of. If eager is not finite either, it is the training: learning rate, precision, data",
        sets=changes.as_eager_does,
    ),
    Rule(
        cause="oom",
        seen=failed(FailureKind.OOM),
        change="halve micro_batch (with --global-batch the rest is accumulated), or recompute activations with "
        "gradient_checkpointing=true",
        sets=changes.less_memory,
    ),
    Rule(
        cause="tight_memory",
        seen=flag("tight_memory", "less of the device's memory stayed free than the study keeps as headroom"),
        change="halve micro_batch or recompute activations, or give a smaller --memory-headroom to let it win",
        sets=changes.less_memory,
    ),
    Rule(
        cause="host_oom",
        seen=failed(FailureKind.HOST_OOM),
        change="free memory of the host: fewer compile workers (TORCHINDUCTOR_COMPILE_THREADS=1), no other programs, "
        "caches not on a tmpfs; on a CPU a smaller micro_batch",
        sets=changes.less_memory_on_a_cpu,
    ),
    Rule(
        cause="hang",
        seen=failed(FailureKind.HANG),
        change="look at the end of the trial's log.txt: a data loader that waits, a compile worker that died "
        "(TORCHINDUCTOR_COMPILE_THREADS=1 runs without workers) or a GPU that does not answer",
    ),
    Rule(
        cause="gpu_fault",
        seen=failed(FailureKind.GPU_FAULT),
        change="look for Xid errors (dmesg); if the GPU is sound, CUDA_LAUNCH_BLOCKING=1 names the kernel, and a mode "
        "without CUDA graphs or a smaller scope may go around it",
        sets=changes.without_cuda_graphs,
    ),
    Rule(
        cause="workload_error",
        seen=failed(FailureKind.WORKLOAD_ERROR),
        change="change what it names: that line of the workload, or the knob's value",
        each=True,
    ),
    Rule(
        cause="infrastructure",
        seen=failed(FailureKind.INFRASTRUCTURE),
        change="mend the machine, not the config; `autocompile doctor` says what it lacks",
        each=True,
    ),
    Rule(
        cause="unknown",
        seen=failed(FailureKind.UNKNOWN),
        change="read the trial's log.txt; python -m autocompile.slice FOLDER runs the slice again by hand",
        each=True,
    ),
    Rule(
        cause="dynamic",
        seen=seen.dynamic_for_one_shape,
        change="dynamic=auto makes the same steps without compiling symbolic sizes, which only takes longer",
        sets=changes.to(dynamic="auto"),
    ),
    Rule(
        cause="throttled",
        seen=flag("throttled", "the GPU's clock was held down during the window: {limits}"),
        change="cool the GPU or lower what heats it, then measure again; a power cap alone is no fault",
    ),
    Rule(
        cause="disturbed",
        seen=flag("disturbed", "another process used the GPU during the window"),
        change="measure on a GPU that nobody else uses (--gpus)",
    ),
    Rule(
        cause="data_bound",
        seen=seen.waits_for_data,
        change="load batches ahead of the step (workers, prefetching, pinned memory): no compile setting helps here",
    ),
    Rule(
        cause="budget",
        seen=seen.cut_short,
        change="give a larger --budget; the same command goes on with the study",
    ),
)
