// Libraries and kernels: an image is loaded from memory, checked against the device, and asked for its kernels.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "driver.h"

namespace emulated {

// Bytes of an ELF file, from itself: the calls that load code give no length. 0: not an ELF file of this machine.
static size_t elf_size(const uint8_t* bytes) {
    if (std::memcmp(bytes, ELFMAG, SELFMAG) != 0) return 0;
    Elf64_Ehdr header;
    std::memcpy(&header, bytes, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_type != ET_DYN || header.e_shentsize != sizeof(Elf64_Shdr)) {
        return 0;
    }
    return header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
}

// The same code loaded twice has variables of its own: every load is another file. Images and their files stay until
// the process ends, because dlopen takes a path that it has seen for the file that it saw there.
static void* open_image(const uint8_t* bytes, size_t size) {
    const int file = memfd_create("simt-image", MFD_CLOEXEC);
    size_t written = 0;
    while (file >= 0 && written < size) {
        const ssize_t step = write(file, bytes + written, size - written);
        if (step <= 0) return nullptr;
        written += step;
    }
    return dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
}

template <typename F>
static F symbol(void* image, const char* name) {
    return reinterpret_cast<F>(dlsym(image, name));
}

static CUresult load(std::shared_ptr<Library>& library, const void* code) {
    const auto* bytes = static_cast<const uint8_t*>(code);
    const size_t size = elf_size(bytes);
    if (size == 0) return CUDA_ERROR_INVALID_IMAGE;
    if (current() != nullptr && size > driver().facts.memory - current()->used) return CUDA_ERROR_OUT_OF_MEMORY;
    void* image = open_image(bytes, size);
    if (image == nullptr) return CUDA_ERROR_INVALID_IMAGE;
    library = std::make_shared<Library>();
    library->launch = symbol<decltype(&simt_launch)>(image, "simt_launch");
    auto abi = symbol<decltype(&simt_abi)>(image, "simt_abi");
    auto arch = symbol<decltype(&simt_arch)>(image, "simt_arch");
    auto count = symbol<decltype(&simt_kernel_count)>(image, "simt_kernel_count");
    auto kernel = symbol<decltype(&simt_kernel)>(image, "simt_kernel");
    if (!library->launch || !abi || !arch || !count || !kernel || abi() != SIMT_ABI) return CUDA_ERROR_INVALID_IMAGE;
    // Code for an older minor of the same major runs, as on a GPU.
    const int made_for = std::atoi(arch() + std::strlen("sm_")), here = driver().facts.arch;
    if (made_for / 10 != here / 10 || made_for > here) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    for (uint32_t i = 0; i < count(); ++i) {
        const SimtKernelInfo& info = *kernel(i);
        auto made = std::make_unique<Kernel>();
        made->name = info.name;
        made->argument_bytes.assign(info.argument_bytes, info.argument_bytes + info.argument_count);
        made->static_shared = info.static_shared;
        made->max_threads = info.max_threads;
        for (int& most : made->dynamic_shared) most = SHARED_WITHOUT_OPTIN - static_cast<int>(info.static_shared);
        driver().kernels.insert(made.get());
        library->kernels[info.name] = std::move(made);
    }
    driver().libraries[library.get()] = library;
    return CUDA_SUCCESS;
}

static Kernel* kernel_of(const void* handle) {
    auto* kernel = static_cast<Kernel*>(const_cast<void*>(handle));
    return driver().kernels.count(kernel) ? kernel : nullptr;
}

static CUresult get_attribute(int* value, CUfunction_attribute wanted, const Kernel& kernel, CUdevice device) {
    if (device < 0 || device >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    const int most = std::min<int>(kernel.max_threads, MOST_THREADS);
    switch (wanted) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = most; break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = kernel.static_shared; break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = driver().facts.arch; break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = kernel.dynamic_shared[device]; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;  // registers and the like: an image does not have them
    }
    return CUDA_SUCCESS;
}

static CUresult set_attribute(CUfunction_attribute wanted, int value, Kernel& kernel, CUdevice device) {
    if (device < 0 || device >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    if (wanted != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_NOT_SUPPORTED;
    const int room = driver().facts.shared_optin() - static_cast<int>(kernel.static_shared);
    if (value < 0 || value > room) return CUDA_ERROR_INVALID_VALUE;
    kernel.dynamic_shared[device] = value;
    return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EXPORTED CUresult cuLibraryLoadData(CUlibrary* handle, const void* code, CUjit_option*, void**, unsigned int,
                                    CUlibraryOption*, void**, unsigned int) {
    ENTER(HEALTHY);
    std::shared_ptr<Library> library;
    if (CUresult error = load(library, code)) return error;
    *handle = reinterpret_cast<CUlibrary>(library.get());
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLibraryUnload(CUlibrary handle) {
    ENTER(HEALTHY);
    auto found = driver().libraries.find(reinterpret_cast<Library*>(handle));
    if (found == driver().libraries.end()) return CUDA_ERROR_INVALID_HANDLE;
    for (auto& [_, kernel] : found->second->kernels) driver().kernels.erase(kernel.get());
    driver().libraries.erase(found);  // pending launches hold what they need
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLibraryGetKernel(CUkernel* handle, CUlibrary library, const char* name) {
    ENTER(HEALTHY);
    auto found = driver().libraries.find(reinterpret_cast<Library*>(library));
    if (found == driver().libraries.end()) return CUDA_ERROR_INVALID_HANDLE;
    auto kernel = found->second->kernels.find(name);
    if (kernel == found->second->kernels.end()) return CUDA_ERROR_NOT_FOUND;
    *handle = reinterpret_cast<CUkernel>(kernel->second.get());
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuKernelGetLibrary(CUlibrary* handle, CUkernel kernel) {
    ENTER(HEALTHY);
    for (auto& [library, kept] : driver().libraries) {
        for (auto& [_, own] : kept->kernels) {
            if (own.get() != reinterpret_cast<Kernel*>(kernel)) continue;
            *handle = reinterpret_cast<CUlibrary>(library);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_HANDLE;
}

EXPORTED CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    ENTER(CONTEXT);
    if (kernel_of(kernel) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *function = reinterpret_cast<CUfunction>(kernel);  // the same in all contexts, which a caller cannot tell
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* bytes) {
    ENTER(HEALTHY);
    const Kernel* kernel = kernel_of(handle);
    if (kernel == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (index >= kernel->argument_bytes.size()) return CUDA_ERROR_INVALID_VALUE;
    size_t end = 0;
    for (size_t i = 0; i <= index; ++i) {
        const size_t size = kernel->argument_bytes[i];
        *offset = (end + size - 1) / size * size;
        end = *offset + size;
    }
    if (bytes != nullptr) *bytes = kernel->argument_bytes[index];
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuKernelGetAttribute(int* value, CUfunction_attribute wanted, CUkernel handle, CUdevice device) {
    ENTER(HEALTHY);
    const Kernel* kernel = kernel_of(handle);
    return kernel ? get_attribute(value, wanted, *kernel, device) : CUDA_ERROR_INVALID_HANDLE;
}

EXPORTED CUresult cuKernelSetAttribute(CUfunction_attribute wanted, int value, CUkernel handle, CUdevice device) {
    ENTER(HEALTHY);
    Kernel* kernel = kernel_of(handle);
    return kernel ? set_attribute(wanted, value, *kernel, device) : CUDA_ERROR_INVALID_HANDLE;
}

EXPORTED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute wanted, CUfunction handle) {
    ENTER(CONTEXT);
    const Kernel* kernel = kernel_of(handle);
    return kernel ? get_attribute(value, wanted, *kernel, current()->device) : CUDA_ERROR_INVALID_HANDLE;
}

EXPORTED CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute wanted, int value) {
    ENTER(CONTEXT);
    Kernel* kernel = kernel_of(handle);
    return kernel ? set_attribute(wanted, value, *kernel, current()->device) : CUDA_ERROR_INVALID_HANDLE;
}

// By threads, blocks and shared memory; an image does not know how many registers the kernel would take.
EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads,
                                                              size_t dynamic_shared) {
    ENTER(CONTEXT);
    const Kernel* kernel = kernel_of(handle);
    if (kernel == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    const Facts& facts = driver().facts;
    const size_t shared = kernel->static_shared + dynamic_shared + facts.shared_reserved;
    const int whole_warps = (threads + 31) / 32 * 32;
    *blocks = std::min(facts.blocks, facts.threads / whole_warps);
    if (shared != 0) *blocks = std::min<int>(*blocks, facts.shared / shared);
    if (threads > static_cast<int>(kernel->max_threads)) *blocks = 0;
    return CUDA_SUCCESS;
}
