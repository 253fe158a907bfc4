"""Last words of dying processes, as torch, CUDA and their libraries print them."""

from __future__ import annotations

DISGUISED = [  # out of memory on a full device, anything on an empty one
    "RuntimeError: CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "torch.AcceleratorError: CUDA error: out of memory",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    "RuntimeError: HIP error: out of memory",
    "torch.AcceleratorError: cudaErrorMemoryAllocation",
    "pycuda: cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "RuntimeError: GET was unable to find an engine to execute this computation",
    "RuntimeError: Unable to find an engine to execute this computation",
    'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1156',
    "RuntimeError: !handles_.at(i) INTERNAL ASSERT FAILED",
    "RuntimeError: CUDA driver error: device not ready",
    "node1: NCCL WARN Cuda failure 'out of memory'",
    "node1: NCCL WARN Cuda failure 2 'out of memory'",
    "NCCL WARN Failed to CUDA calloc 6291456 bytes",
    "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp",
    "terminate called after throwing an instance of 'c10::Error'",
    "RuntimeError: aoti_torch_empty_strided(3, int_array_74, 0, &buf80_handle) API call failed at main.cpp, line 3311",
]
PLAIN = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB",
    "RuntimeError: XPU out of memory, please use `empty_cache` to release cached memory",
    "RuntimeError: MPS backend out of memory (MPS allocated: 9.07 GB, max allowed: 9.07 GB).",
    "[W831 CUDACachingAllocator.cpp:508] expandable_segments: memory mapping failed with OOM on device 0 while trying"
    " to map 20971520 bytes\nRuntimeError: aoti_torch_empty_strided(3, int_array_74) API call failed at main.cpp",
]
NEVER_OOM = [
    "RuntimeError: CUDA error: device-side assert triggered",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144, Hardware limit: 101376",
    "torch.OutOfMemoryError: out of resource: triton_mm Required: 262144 Hardware limit:232448 Reducing block sizes",
    "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 109951162777 bytes. Error code 12",
    "terminate called after throwing an instance of 'c10::Error'\n"
    "  what():  DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes. Error code 12",
    "OSError: [Errno 98] Address already in use",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
]
