"""Texts by which an exhausted or a broken device is known, in an exception's message or at the end of a log."""

from __future__ import annotations

NEARLY_FULL = 0.9  # share of the device's memory above which an ambiguous text counts as out of memory

PLAIN_OOM = r"(CUDA|HIP|XPU|MPS backend) out of memory"
# Texts behind which an exhausted device hides (pytorch#81620, pytorch#185240, pytorch#152302, bitsandbytes#959, #597)
DISGUISED_OOM = (
    r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR|Unable to find an engine to execute"
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED|handles_\.at\(i\) INTERNAL ASSERT FAILED"
    r"|CUDA driver error: device not ready|Cuda failure 'out of memory'|Failed to CUDA calloc"
    r"|Error out of memory at line|terminate called after throwing an instance of 'c10::Error'"
)
BROKEN_DEVICE = (
    r"illegal memory access|cudaErrorIllegalAddress|device-side assert triggered|misaligned address"
    r"|unspecified launch failure|\bXid\b"
)
# What any failing call of the device says; some of it is a disguise of the above, so it is asked last
FAILED_CALL = r"CUDA error:|CUDA driver error|CUBLAS_STATUS_|CUDNN_STATUS_|INTERNAL ASSERT FAILED.*CUDACachingAllocator"
