// Launches: refused at once if the device could not take them, otherwise run when their turn comes.
#include <cstring>

#include "driver.h"

namespace emulated {

static CUresult check(const CUlaunchConfig& config, const Kernel& kernel) {
    const uint64_t threads = uint64_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
    const bool fits = config.gridDimX <= 2147483647u && config.gridDimY <= 65535 && config.gridDimZ <= 65535;
    const bool any = config.gridDimX != 0 && config.gridDimY != 0 && config.gridDimZ != 0;
    const bool few = threads != 0 && threads <= MOST_THREADS && config.blockDimZ <= 64;
    if (!fits || !any || !few) return CUDA_ERROR_INVALID_VALUE;
    if (threads > kernel.max_threads) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    const unsigned most = kernel.dynamic_shared[current()->device];
    return config.sharedMemBytes > most ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult meaning(const SimtReport& report) {
    if (std::strcmp(report.kind, "out-of-bounds") == 0) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (std::strcmp(report.kind, "misaligned") == 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
    return CUDA_ERROR_LAUNCH_FAILED;
}

static std::string triple(const uint32_t* xyz) {
    return "(" + std::to_string(xyz[0]) + ", " + std::to_string(xyz[1]) + ", " + std::to_string(xyz[2]) + ")";
}

static std::string told(const Kernel& kernel, const SimtReport& report) {
    std::string text = std::string(report.kind) + ": " + report.message + " in " + kernel.name;
    return text + ", block " + triple(report.place.block) + ", thread " + triple(report.place.thread);
}

void run_kernel(Context& context, const Kernel& kernel, const CUlaunchConfig& config,
                std::vector<std::vector<uint8_t>>& arguments) {
    std::vector<void*> addresses;
    for (auto& argument : arguments) addresses.push_back(argument.data());
    std::vector<SimtRegion> regions;
    for (auto& [begin, allocation] : driver().allocations) {
        if (allocation.context != &context) continue;  // no peer access
        regions.push_back({"device memory", begin, allocation.bytes, allocation.defined.get(), 1, 0});
    }
    SimtLaunch launch = {};
    launch.kernel = kernel.name.c_str();
    const uint32_t grid[] = {config.gridDimX, config.gridDimY, config.gridDimZ};
    const uint32_t block[] = {config.blockDimX, config.blockDimY, config.blockDimZ};
    std::memcpy(launch.grid, grid, sizeof grid);
    std::memcpy(launch.block, block, sizeof block);
    launch.dynamic_shared = config.sharedMemBytes;
    launch.seed = driver().facts.seed + driver().runs++;  // another schedule every time
    launch.arguments = addresses.data();
    launch.regions = regions.data();
    launch.region_count = regions.size();
    SimtReport report = {};
    const int result = kernel.library->launch(&launch, &report);
    if (result == 0) return;
    context.sticky = result == 1 ? meaning(report) : CUDA_ERROR_LAUNCH_FAILED;
    driver().report = told(kernel, report);
}

}  // namespace emulated

using namespace emulated;

EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
    ENTER(CONTEXT);
    auto* kernel = reinterpret_cast<Kernel*>(function);
    auto stream = stream_of(config->hStream);
    if (driver().kernels.count(kernel) == 0 || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->context != current()) return CUDA_ERROR_INVALID_HANDLE;
    if (config->numAttrs != 0 || extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    if (CUresult error = check(*config, *kernel)) return error;
    if (arguments == nullptr && !kernel->argument_bytes.empty()) return CUDA_ERROR_INVALID_VALUE;
    std::vector<std::vector<uint8_t>> values;  // of now, and as wide as the kernel takes them
    for (size_t i = 0; i < kernel->argument_bytes.size(); ++i) {
        auto* begin = static_cast<const uint8_t*>(arguments[i]);
        values.emplace_back(begin, begin + kernel->argument_bytes[i]);
    }
    ++driver().launches;
    Kernel copy = *kernel;  // the launch outlives an unloaded library
    for (auto& [_, library] : driver().libraries) {
        if (library->kernels.count(copy.name) && library->kernels[copy.name].get() == kernel) copy.library = library;
    }
    Context& context = *stream->context;
    auto run = [&context, copy, values, config = *config]() mutable { run_kernel(context, copy, config, values); };
    enqueue(stream, std::move(run));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream stream,
                                 void** arguments, void** extra) {
    const CUlaunchConfig config = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, nullptr, 0};
    return cuLaunchKernelEx(&config, function, arguments, extra);
}
