// Everything that cuGetProcAddress gives out: the name, the CUDA version since which it means this function, and the function.
#include "driver.h"

namespace emulated {

// The text is the plain name; the function is what cuda.h maps it to, cuMemAlloc_v2 for cuMemAlloc.
#define ENTRY(name, version) {#name, version, reinterpret_cast<Function>(&name)}

const std::vector<Entry>& entries() {
    static const std::vector<Entry> all = {
        ENTRY(cuGetProcAddress, 12000),
        ENTRY(cuInit, 2000),
        ENTRY(cuDriverGetVersion, 2020),
        ENTRY(cuGetExportTable, 3000),
        ENTRY(cuGetErrorName, 6000),
        ENTRY(cuGetErrorString, 6000),

        ENTRY(cuDeviceGet, 2000),
        ENTRY(cuDeviceGetAttribute, 2000),
        ENTRY(cuDeviceGetCount, 2000),
        ENTRY(cuDeviceGetName, 2000),
        ENTRY(cuDeviceGetUuid, 11040),
        ENTRY(cuDeviceTotalMem, 3020),
        ENTRY(cuDevicePrimaryCtxGetState, 7000),
        ENTRY(cuDevicePrimaryCtxRelease, 11000),
        ENTRY(cuDevicePrimaryCtxRetain, 7000),
        ENTRY(cuCtxGetCurrent, 4000),
        ENTRY(cuCtxGetDevice, 2000),
        ENTRY(cuCtxGetStreamPriorityRange, 5050),
        ENTRY(cuCtxPopCurrent, 4000),
        ENTRY(cuCtxPushCurrent, 4000),
        ENTRY(cuCtxSetCurrent, 4000),
        ENTRY(cuCtxSynchronize, 2000),

        ENTRY(cuStreamCreate, 2000),
        ENTRY(cuStreamCreateWithPriority, 5050),
        ENTRY(cuStreamDestroy, 4000),
        ENTRY(cuStreamGetCtx, 9020),
        ENTRY(cuStreamGetFlags, 5050),
        ENTRY(cuStreamGetPriority, 5050),
        ENTRY(cuStreamQuery, 2000),
        ENTRY(cuStreamSynchronize, 2000),
        ENTRY(cuStreamWaitEvent, 3020),
        ENTRY(cuEventCreate, 2000),
        ENTRY(cuEventDestroy, 4000),
        ENTRY(cuEventQuery, 2000),
        ENTRY(cuEventRecord, 2000),
        ENTRY(cuEventSynchronize, 2000),

        ENTRY(cuMemAlloc, 3020),
        ENTRY(cuMemAllocAsync, 11020),
        ENTRY(cuMemAllocHost, 3020),
        ENTRY(cuMemFree, 3020),
        ENTRY(cuMemFreeAsync, 11020),
        ENTRY(cuMemFreeHost, 2000),
        ENTRY(cuMemGetInfo, 3020),
        ENTRY(cuMemcpy, 4000),
        ENTRY(cuMemcpyAsync, 4000),
        ENTRY(cuMemcpyHtoD, 3020),
        ENTRY(cuMemcpyHtoDAsync, 3020),
        ENTRY(cuMemcpyDtoH, 3020),
        ENTRY(cuMemcpyDtoHAsync, 3020),
        ENTRY(cuMemcpyDtoDAsync, 3020),
        ENTRY(cuMemsetD8Async, 3020),
        ENTRY(cuMemsetD32Async, 3020),

        ENTRY(cuLibraryLoadData, 12000),
        ENTRY(cuLibraryUnload, 12000),
        ENTRY(cuLibraryGetKernel, 12000),
        ENTRY(cuKernelGetAttribute, 12000),
        ENTRY(cuKernelGetFunction, 12000),
        ENTRY(cuKernelGetLibrary, 12050),
        ENTRY(cuKernelGetParamInfo, 12040),
        ENTRY(cuKernelSetAttribute, 12000),
        ENTRY(cuFuncGetAttribute, 2020),
        ENTRY(cuFuncSetAttribute, 9000),
        ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050),
        ENTRY(cuLaunchKernel, 4000),
        ENTRY(cuLaunchKernelEx, 11060),

        ENTRY(cuStreamBeginCapture, 10010),
        ENTRY(cuStreamEndCapture, 10000),
        ENTRY(cuStreamIsCapturing, 10000),
        ENTRY(cuGraphInstantiateWithFlags, 11040),
        ENTRY(cuGraphLaunch, 10000),
        ENTRY(cuGraphDestroy, 10000),
        ENTRY(cuGraphExecDestroy, 10000),
    };
    return all;
}

}  // namespace emulated
