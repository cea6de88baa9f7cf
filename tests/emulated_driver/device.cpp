// The devices, their primary contexts, and which context a thread has current.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "driver.h"

namespace emulated {

static thread_local std::vector<Context*> stack_;  // of this thread, the current one last

Context* current() {
    return stack_.empty() ? nullptr : stack_.back();
}

static bool is_device(CUdevice device) {
    return device >= 0 && device < DEVICES;
}

// Null for a handle that names no context.
static Context* context_of(CUcontext handle) {
    for (Context& context : driver().contexts) {
        if (reinterpret_cast<CUcontext>(&context) == handle) return &context;
    }
    return nullptr;
}

// Attributes that are not named here are 0: the device does not have them.
static int attribute(CUdevice_attribute wanted) {
    const Facts& facts = driver().facts;
    switch (wanted) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return facts.arch / 10;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return facts.arch % 10;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 2;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return MOST_THREADS;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return facts.threads;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return facts.blocks;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return SHARED_WITHOUT_OPTIN;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return facts.shared_optin();
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return facts.shared;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return facts.shared_reserved;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 0;
        default: return 0;
    }
}

}  // namespace emulated

using namespace emulated;

EXPORTED CUresult cuDeviceGetCount(int* count) {
    ENTER(INITIALISED);
    *count = DEVICES;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    ENTER(INITIALISED);
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    ENTER(INITIALISED);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, length, "embforge emulated sm_%d", driver().facts.arch);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    ENTER(INITIALISED);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memcpy(uuid->bytes, "embforge-emulate", sizeof uuid->bytes);
    uuid->bytes[0] += static_cast<char>(device);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
    ENTER(INITIALISED);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = driver().facts.memory;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute wanted, CUdevice device) {
    ENTER(INITIALISED);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (wanted <= 0 || wanted >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value = attribute(wanted);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    ENTER(INITIALISED);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    ++driver().contexts[device].references;
    *context = reinterpret_cast<CUcontext>(&driver().contexts[device]);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(INITIALISED);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (driver().contexts[device].references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --driver().contexts[device].references;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
    ENTER(INITIALISED);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = driver().contexts[device].references > 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) {
    ENTER(INITIALISED);
    *context = reinterpret_cast<CUcontext>(current());
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(INITIALISED);
    if (context != nullptr && context_of(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (!stack_.empty()) stack_.pop_back();
    if (context != nullptr) stack_.push_back(context_of(context));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(INITIALISED);
    if (context_of(context) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    stack_.push_back(context_of(context));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxPopCurrent(CUcontext* context) {
    ENTER(INITIALISED);
    if (stack_.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context != nullptr) *context = reinterpret_cast<CUcontext>(stack_.back());
    stack_.pop_back();
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetDevice(CUdevice* device) {
    ENTER(CONTEXT);
    *device = current()->device;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER(CONTEXT);
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -1;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSynchronize() {
    ENTER(CONTEXT);
    if (CUresult error = refuse_in_capture()) return error;
    run_all(*current());
    return current()->sticky;
}
