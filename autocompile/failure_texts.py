"""Texts by which a failure is known, in an exception's message or at the end of a log, and the subkinds of failures."""

from __future__ import annotations

NEARLY_FULL = 0.9  # share of the device's memory above which an ambiguous text counts as out of memory

# Subkinds that decide what is done about a failure
NO_COMPILER = "no_compiler"
CACHE_FOLDER = "cache_folder"  # the folder for compiled code does not work
SPARE_CACHE_FOLDER = "spare_cache_folder"  # nor does the one that was tried in its place
COMPILE_WORKERS = "compile_workers"  # inductor's own processes died
GPU_TOO_OLD = "gpu_too_old"
CUDAGRAPH_LIVENESS = "cudagraph_liveness"

MISSING_TOOL = (
    r"No working C\+\+ compiler found|Failed to find C compiler|Cannot find a working triton|Cannot find ptxas"
    r"|Python\.h: No such file"
)
BROKEN_DISK = (
    r"failed to map segment from shared object|No space left on device|Disk quota exceeded|Read-only file system"
    r"|No usable temporary directory"
)
PORT_IN_USE = r"Address already in use|EADDRINUSE"
DEAD_WORKERS = r"BrokenProcessPool|terminated abruptly|compilation subprocess exited unexpectedly"

OUT_OF_RESOURCE = r"out of resource"  # of the chip, which torch also raises as its OutOfMemoryError
PLAIN_OOM = r"(CUDA|HIP|XPU|MPS backend) out of memory|memory mapping failed with OOM"
# Texts behind which an exhausted device hides (pytorch#81620, pytorch#185240, pytorch#152302, bitsandbytes#959, #597)
DISGUISED_OOM = (
    r"(?i:\b(cuda|hip|triton)\b[^\n]{0,40}\bout of memory)|(cuda|hip)ErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|CUFFT_ALLOC_FAILED"
    r"|\b(CU|HIP|ROC|MIOPEN)\w*_STATUS_(ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR)"
    r"|(?i:Unable to find an engine to execute)|INTERNAL ASSERT FAILED at \"[^\"\n]*CUDACachingAllocator"
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED|handles_\.at\(i\) INTERNAL ASSERT FAILED"
    r"|CUDA driver error: device not ready|Failed to CUDA calloc|aoti_torch_\w+\(.*API call failed"
    r"|Error out of memory at line|terminate called after throwing an instance of 'c10::Error'"
)
HOST_OOM = (
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Killed signal terminated program"
    r"|killed by signal: Killed|std::bad_alloc|Cannot allocate memory|^MemoryError\b"
)
BROKEN_DEVICE = (
    r"illegal memory access|cudaErrorIllegalAddress|device-side assert triggered|misaligned address"
    r"|unspecified launch failure|\bXid\b"
)
# What any failing call of the device says; some of it is a disguise of the above, so it is asked last
FAILED_CALL = (
    r"CUDA error:|CUDA driver error|CUBLAS_STATUS_|CUDNN_STATUS_(?!NOT_SUPPORTED)|unhandled cuda error"
    r"|INTERNAL ASSERT FAILED.*CUDACachingAllocator"
)

RECOMPILE_LIMIT = r"recompile_limit reached|cache_size_limit reached|Hard failure due to fullgraph"
NO_FRAMES = r"fullgraph=True found no compiled frames"
SDPA = (
    r"No viable backend for scaled_dot_product_attention|No available kernel\.\s+Aborting execution"
    r"|No execution plans support the graph|cuDNN Frontend error|mha_graph.*is_good\(\)|CUDNN_STATUS_NOT_SUPPORTED"
    r"|Explicit attn_mask should not be set when is_causal|Flash ?Attention (forward )?only supports"
    r"|No operator found for `memory_efficient_attention"
)
CUDAGRAPH_OVERWRITTEN = r"tensor output of CUDAGraphs that has been overwritten"
CUDAGRAPH_CHECKPOINT = r"graph recording observed an input tensor deallocate"
OLD_GPU = r"too old to be supported by the triton GPU compiler"
COMPILER_BUG = (
    rf"OutOfResources|{OUT_OF_RESOURCE}|ptxas fatal|LoweringException|NoValidChoicesError"
    r"|expected size \d+==\d+, stride \d+==\d+|was invalid, but is output|lift_tracked_freevar_to_input"
)
