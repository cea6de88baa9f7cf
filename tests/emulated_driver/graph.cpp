// Stream capture: work goes into a graph instead of being queued. One stream a capture, in "global" mode.
#include "driver.h"

namespace emulated {

CUresult refuse_in_capture(Stream* only) {
    for (auto& [_, stream] : driver().streams) {
        if (stream->capture == nullptr || (only != nullptr && only != stream.get())) continue;
        stream->capture_broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EXPORTED CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = std::make_unique<Graph>();
    stream->capture_broken = false;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    std::shared_ptr<Graph> made = std::move(stream->capture);
    *graph = nullptr;
    if (stream->capture_broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    driver().graphs[made.get()] = made;
    *graph = reinterpret_cast<CUgraph>(made.get());
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *status = stream->capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture_broken   ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
    ENTER(CONTEXT);
    auto found = driver().graphs.find(reinterpret_cast<Graph*>(graph));
    if (found == driver().graphs.end()) return CUDA_ERROR_INVALID_HANDLE;
    auto made = std::make_shared<Graph>(*found->second);
    driver().executables[made.get()] = made;
    *executable = reinterpret_cast<CUgraphExec>(made.get());
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    ENTER(CONTEXT);
    auto found = driver().executables.find(reinterpret_cast<Graph*>(executable));
    auto stream = stream_of(handle);
    if (found == driver().executables.end() || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    for (auto& work : found->second->works) enqueue(stream, work);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGraphDestroy(CUgraph graph) {
    ENTER(HEALTHY);
    return driver().graphs.erase(reinterpret_cast<Graph*>(graph)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORTED CUresult cuGraphExecDestroy(CUgraphExec executable) {
    ENTER(HEALTHY);
    return driver().executables.erase(reinterpret_cast<Graph*>(executable)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
