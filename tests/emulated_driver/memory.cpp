// Device memory is memory of this process that kernels may touch; nothing else is. Copies wait in streams.
#include <cstring>

#include "driver.h"

namespace emulated {

constexpr size_t ALIGNMENT = 256;
constexpr size_t APART = 16 * 1024;  // between allocations, so that a near miss does not hit another one
constexpr uint8_t FRESH = 0xEB, FREED = 0xDD;  // contents of memory that was never written, or was given back

Allocation* allocation_of(uint64_t address) {
    auto next = driver().allocations.upper_bound(address);
    if (next == driver().allocations.begin()) return nullptr;
    Allocation& found = std::prev(next)->second;
    return address < found.begin + found.bytes ? &found : nullptr;
}

void set_defined(uint64_t address, size_t bytes) {
    Allocation* found = allocation_of(address);
    if (found != nullptr) std::memset(found->defined.get() + (address - found->begin), 1, bytes);
}

static bool holds(uint64_t address, size_t bytes) {
    const Allocation* found = allocation_of(address);
    return found != nullptr && address + bytes <= found->begin + found->bytes;
}

static bool is_pinned(uint64_t address) {
    auto next = driver().host_bytes.upper_bound(address);
    if (next == driver().host_bytes.begin()) return false;
    auto& [begin, bytes] = *std::prev(next);
    return address < begin + bytes;
}

static uint64_t aligned(const uint8_t* memory) {
    return (reinterpret_cast<uint64_t>(memory) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static CUresult allocate(CUdeviceptr* address, size_t bytes) {
    Driver& d = driver();
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const size_t room = d.facts.memory, used = current()->used;
    if (bytes > room || used > room - bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    std::unique_ptr<uint8_t[]> memory(new uint8_t[bytes + 2 * APART]);
    const uint64_t begin = aligned(memory.get() + APART - ALIGNMENT);
    std::memset(reinterpret_cast<void*>(begin), FRESH, bytes);
    d.allocations[begin] = {current(), std::move(memory), begin, bytes, std::make_unique<uint8_t[]>(bytes)};
    current()->used += bytes;
    *address = begin;
    return CUDA_SUCCESS;
}

static void release(CUdeviceptr address) {
    auto found = driver().allocations.find(address);
    if (found == driver().allocations.end()) return;  // given back twice: the second time is refused below
    std::memset(reinterpret_cast<void*>(found->second.begin), FREED, found->second.bytes);
    found->second.context->used -= found->second.bytes;
    driver().allocations.erase(found);
}

static bool is_begin(CUdeviceptr address) {
    return driver().allocations.count(address) != 0;
}

static void move(uint64_t to, uint64_t from, size_t bytes) {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    set_defined(to, bytes);
}

// Copies in stream order. Pageable memory is read at once, and written before the call returns, as drivers do.
static CUresult copy(uint64_t to, uint64_t from, size_t bytes, CUstream handle) {
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    const bool to_device = allocation_of(to), from_device = allocation_of(from);
    if ((to_device && !holds(to, bytes)) || (from_device && !holds(from, bytes))) return CUDA_ERROR_INVALID_VALUE;
    if (!from_device && !is_pinned(from) && stream->capture == nullptr) {
        auto* begin = reinterpret_cast<const uint8_t*>(from);
        std::vector<uint8_t> staged(begin, begin + bytes);
        enqueue(stream, [=] { move(to, reinterpret_cast<uint64_t>(staged.data()), bytes); });
    } else {
        enqueue(stream, [=] { move(to, from, bytes); });
    }
    if (!to_device && !is_pinned(to)) {
        if (CUresult error = refuse_in_capture(stream.get())) return error;
        run_until({stream, stream->last});
    }
    return current()->sticky;
}

static CUresult copy_now(uint64_t to, uint64_t from, size_t bytes) {
    if (CUresult error = refuse_in_capture()) return error;
    if (CUresult error = copy(to, from, bytes, nullptr)) return error;
    return cuStreamSynchronize(nullptr);
}

template <typename T>
static CUresult fill(CUdeviceptr to, T value, size_t count, CUstream handle) {
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (count == 0) return CUDA_SUCCESS;
    if (to % sizeof(T) != 0 || !holds(to, count * sizeof(T))) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, [=] {
        for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(to)[i] = value;
        set_defined(to, count * sizeof(T));
    });
    return CUDA_SUCCESS;
}

static uint64_t number(const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer);
}

}  // namespace emulated

using namespace emulated;

EXPORTED CUresult cuMemGetInfo(size_t* left, size_t* total) {
    ENTER(CONTEXT);
    *total = driver().facts.memory;
    *left = *total - current()->used;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    ENTER(CONTEXT);
    if (CUresult error = refuse_in_capture()) return error;
    return allocate(address, bytes);
}

EXPORTED CUresult cuMemFree(CUdeviceptr address) {
    ENTER(CONTEXT);
    if (address == 0) return CUDA_SUCCESS;
    if (!is_begin(address)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult error = refuse_in_capture()) return error;
    run_all(*current());
    release(address);
    return current()->sticky;
}

// Room is counted at once, the memory itself may be used from now on: one stream's order is all that tests need.
EXPORTED CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream handle) {
    ENTER(CONTEXT);
    if (stream_of(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return allocate(address, bytes);
}

EXPORTED CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!is_begin(address)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, [=] { release(address); });
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAllocHost(void** pointer, size_t bytes) {
    ENTER(CONTEXT);
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    std::unique_ptr<uint8_t[]> memory(new uint8_t[bytes + ALIGNMENT]);
    const uint64_t begin = aligned(memory.get());
    std::memset(reinterpret_cast<void*>(begin), FRESH, bytes);
    driver().host[begin] = std::move(memory);
    driver().host_bytes[begin] = bytes;
    *pointer = reinterpret_cast<void*>(begin);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemFreeHost(void* pointer) {
    ENTER(CONTEXT);
    if (driver().host.count(number(pointer)) == 0) return CUDA_ERROR_INVALID_VALUE;
    run_all(*current());
    driver().host.erase(number(pointer));
    driver().host_bytes.erase(number(pointer));
    return current()->sticky;
}

EXPORTED CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER(CONTEXT);
    return copy_now(to, from, bytes);
}

EXPORTED CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    ENTER(CONTEXT);
    return holds(to, bytes) ? copy_now(to, number(from), bytes) : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    ENTER(CONTEXT);
    return holds(from, bytes) ? copy_now(number(to), from, bytes) : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(CONTEXT);
    return copy(to, from, bytes, stream);
}

EXPORTED CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    ENTER(CONTEXT);
    return holds(to, bytes) ? copy(to, number(from), bytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(CONTEXT);
    return holds(from, bytes) ? copy(number(to), from, bytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(CONTEXT);
    return holds(to, bytes) && holds(from, bytes) ? copy(to, from, bytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    ENTER(CONTEXT);
    return fill<uint8_t>(to, value, count, stream);
}

EXPORTED CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
    ENTER(CONTEXT);
    return fill<uint32_t>(to, value, count, stream);
}
