// Entry points: who may use this library at all, the table of cuGetProcAddress, errors in words, and what tests set.
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace emulated {

constexpr const char* CONSENT = "EMBFORGE_EMULATED_DRIVER";

Driver& driver() {
    static Driver* one = new Driver;  // never destroyed: Python lets go of handles at its very end
    return *one;
}

std::string refusal(const std::string& root) {
    const char* consent = std::getenv(CONSENT);
    if (consent == nullptr || *consent == '\0') {
        return std::string("it is for tests, and ") + CONSENT + " is not set";
    }
    for (const char* sign : {"/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version"}) {
        struct stat found;
        if (stat((root + sign).c_str(), &found) == 0) return std::string("a real driver is here: ") + sign + " exists";
    }
    return "";
}

// "arch=90 threads=2048 ...". False if something is missing.
static bool configure(Facts& facts, const char* text) {
    return std::sscanf(text, "arch=%d threads=%d blocks=%d shared=%d reserved=%d", &facts.arch, &facts.threads,
                       &facts.blocks, &facts.shared, &facts.shared_reserved) == 5;
}

Call::Call(Needs needs) : lock_(driver().mutex) {
    if (needs == NOTHING) return;
    if (!driver().initialised) {
        error = CUDA_ERROR_NOT_INITIALIZED;
    } else if (needs != INITIALISED && current() != nullptr && current()->sticky != CUDA_SUCCESS) {
        error = current()->sticky;
    } else if (needs == CONTEXT && (current() == nullptr || current()->references == 0)) {
        error = CUDA_ERROR_INVALID_CONTEXT;
    }
}

struct Error {
    CUresult code;
    const char* name;
    const char* text;
};

#define ERROR(code, text) {code, #code, text}
static const Error ERRORS[] = {
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream cannot be captured"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
};

static const Error* error_of(CUresult code) {
    for (const Error& error : ERRORS) {
        if (error.code == code) return &error;
    }
    return nullptr;
}

}  // namespace emulated

using namespace emulated;

EXPORTED CUresult cuInit(unsigned int flags) {
    ENTER(NOTHING);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (driver().initialised) return CUDA_SUCCESS;
    std::string reason = refusal("");
    if (reason.empty() && !configure(driver().facts, std::getenv(CONSENT))) {
        reason = std::string(CONSENT) + "=\"" + std::getenv(CONSENT) + "\" does not describe a device";
    }
    if (!reason.empty()) {
        std::fprintf(stderr, "embforge's emulated CUDA driver refuses to start: %s\n", reason.c_str());
        return CUDA_ERROR_NO_DEVICE;
    }
    for (int i = 0; i < DEVICES; ++i) driver().contexts[i].device = i;
    driver().initialised = true;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDriverGetVersion(int* version) {
    ENTER(NOTHING);
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = driver().facts.version;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGetErrorName(CUresult code, const char** text) {
    const Error* error = error_of(code);
    *text = error ? error->name : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuGetErrorString(CUresult code, const char** text) {
    const Error* error = error_of(code);
    *text = error ? error->text : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags,
                                   CUdriverProcAddressQueryResult* status) {
    const Entry* best = nullptr;
    bool known = false;
    for (const Entry& entry : entries()) {
        if (std::strcmp(entry.name, name) != 0) continue;
        known = true;
        if (entry.version <= version) best = &entry;
    }
    *function = best ? reinterpret_cast<void*>(best->function) : nullptr;
    if (status != nullptr) {
        *status = best    ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return best ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// NVRTC looks for private tables of the driver here, and does without them.
EXPORTED CUresult cuGetExportTable(const void** table, const CUuuid*) {
    *table = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}

// ---- What tests set and ask. No driver has these.

// Why this library would refuse to start under a root directory; null if it would start.
EXPORTED const char* emulated_refusal(const char* root) {
    static std::string text;
    text = refusal(root);
    return text.empty() ? nullptr : text.c_str();
}

// What a kernel did wrong, in the executor's words; empty if none did.
EXPORTED const char* emulated_report() {
    return driver().report.c_str();
}

// Sets one of the devices' facts by name. False: no such name.
EXPORTED int emulated_set(const char* name, uint64_t value) {
    ENTER(NOTHING);
    Facts& facts = driver().facts;
    const std::string wanted = name;
    if (wanted == "version") facts.version = static_cast<int>(value);
    else if (wanted == "arch") facts.arch = static_cast<int>(value);
    else if (wanted == "memory") facts.memory = value;
    else if (wanted == "patience") facts.patience = value;
    else if (wanted == "seed") facts.seed = value;
    else return 0;
    return 1;
}

EXPORTED uint64_t emulated_launches() {
    ENTER(NOTHING);
    return driver().launches;
}

EXPORTED uint64_t emulated_memory_used(int device) {
    ENTER(NOTHING);
    return driver().contexts[device].used;
}

// The host wrote there without the driver, which is not possible on a GPU.
EXPORTED void emulated_wrote(uint64_t address, uint64_t bytes) {
    std::lock_guard<std::recursive_mutex> lock(driver().mutex);
    set_defined(address, bytes);
}

// Whether all of this is memory of the device.
EXPORTED int emulated_holds(int device, uint64_t address, uint64_t bytes) {
    ENTER(NOTHING);
    const Allocation* found = allocation_of(address);
    return found != nullptr && found->context->device == device && address + bytes <= found->begin + found->bytes;
}

// Puts a function of the host into a stream of the current device, as if it were a kernel: its turn comes after the
// work before it, also in every replay of a captured graph. It answers whether all went well.
EXPORTED int emulated_enqueue(uint64_t stream_handle, int (*function)(uint64_t), uint64_t number) {
    ENTER(CONTEXT);
    auto stream = stream_of(reinterpret_cast<CUstream>(stream_handle));
    if (stream == nullptr || stream->context != current()) return CUDA_ERROR_INVALID_HANDLE;
    Context& context = *stream->context;
    enqueue(stream, [&context, function, number] {
        if (function(number)) return;
        context.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        driver().report = "an operation of torch went wrong, see stderr";
    });
    return CUDA_SUCCESS;
}

// Does all work that is pending on any device.
EXPORTED void emulated_finish() {
    std::lock_guard<std::recursive_mutex> lock(driver().mutex);
    for (Context& context : driver().contexts) run_all(context);
}

// As a new process finds the devices: nothing is pending, and no kernel went wrong. Memory and code stay.
EXPORTED void emulated_restart() {
    std::lock_guard<std::recursive_mutex> lock(driver().mutex);
    for (Context& context : driver().contexts) {
        for (auto& stream : streams_of(context)) {
            stream->queue.clear();
            stream->finished = stream->last;
            stream->capture.reset();
        }
        context.sticky = CUDA_SUCCESS;
    }
    driver().retired.clear();
    driver().report.clear();
}
