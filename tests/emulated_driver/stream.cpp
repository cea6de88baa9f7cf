// Streams and events: work waits in the order in which it came until a caller waits for it.
#include "driver.h"

namespace emulated {

// The default streams are made when they are first used.
static std::shared_ptr<Stream> default_stream(std::shared_ptr<Stream>& stream, bool legacy) {
    if (stream == nullptr) {
        stream = std::make_shared<Stream>();
        stream->context = current();
        stream->legacy = legacy;
    }
    return stream;
}

std::shared_ptr<Stream> stream_of(CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return default_stream(current()->legacy, true);
    if (handle == CU_STREAM_PER_THREAD) return default_stream(current()->per_thread, false);
    auto found = driver().streams.find(reinterpret_cast<Stream*>(handle));
    return found == driver().streams.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Stream>> streams_of(const Context& context) {
    std::vector<std::shared_ptr<Stream>> all;
    for (auto& stream : driver().retired) {
        if (stream->context == &context) all.push_back(stream);
    }
    for (auto& [_, stream] : driver().streams) {
        if (stream->context == &context) all.push_back(stream);
    }
    for (auto& stream : {context.legacy, context.per_thread}) {
        if (stream != nullptr) all.push_back(stream);
    }
    return all;
}

bool finished(const Point& point) {
    return point.stream == nullptr || point.stream->finished >= point.sequence;
}

// What must be done before a piece of work: its own condition, and the legacy stream's turns with blocking streams.
static void run_before(const std::shared_ptr<Stream>& stream, uint64_t sequence, const Point& after) {
    if (after.stream != nullptr) run_until(after);
    for (auto& other : streams_of(*stream->context)) {
        if (other != stream && other->blocking && stream->blocking && (other->legacy || stream->legacy)) {
            run_until({other, sequence - 1});
        }
    }
}

void run_until(const Point& point) {
    Stream& stream = *point.stream;
    const CUresult& sticky = stream.context->sticky;
    while (!stream.queue.empty() && stream.queue.front().sequence <= point.sequence) {
        Work work = std::move(stream.queue.front());  // what it waits for is older, so no caller needs to see it meanwhile
        stream.queue.pop_front();
        if (sticky == CUDA_SUCCESS) {
            run_before(point.stream, work.sequence, work.after);
            if (sticky == CUDA_SUCCESS) work.run();
        }
        stream.finished = work.sequence;
        stream.asked = 0;
    }
    if (stream.queue.empty()) {
        stream.finished = stream.last;
        driver().retired.erase(point.stream);
    }
}

void run_all(Context& context) {
    for (auto& stream : streams_of(context)) run_until({stream, stream->last});
}

void enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> run, Point after) {
    if (stream->capture != nullptr) {
        stream->capture->works.push_back(std::move(run));
        return;
    }
    stream->last = ++driver().sequence;
    stream->queue.push_back({stream->last, std::move(run), std::move(after)});
}

// Work is also done if no caller waits for it, but a query at once finds it unfinished.
static CUresult query(const Point& point, uint64_t& asked) {
    if (finished(point)) return current()->sticky;
    if (asked++ < driver().facts.patience) return CUDA_ERROR_NOT_READY;
    run_until(point);
    return current()->sticky;
}

static std::shared_ptr<Event> event_of(CUevent handle) {
    auto found = driver().events.find(reinterpret_cast<Event*>(handle));
    return found == driver().events.end() ? nullptr : found->second;
}

}  // namespace emulated

using namespace emulated;

EXPORTED CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned int flags, int priority) {
    ENTER(CONTEXT);
    auto stream = std::make_shared<Stream>();
    stream->context = current();
    stream->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    stream->priority = priority;
    driver().streams[stream.get()] = stream;
    *handle = reinterpret_cast<CUstream>(stream.get());
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamCreate(CUstream* handle, unsigned int flags) {
    return cuStreamCreateWithPriority(handle, flags, 0);
}

EXPORTED CUresult cuStreamDestroy(CUstream handle) {
    ENTER(HEALTHY);
    auto stream = stream_of(handle);
    if (stream == nullptr || driver().streams.erase(stream.get()) == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (!stream->queue.empty()) driver().retired.insert(stream);  // its work is still done
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
    ENTER(CONTEXT);
    if (stream_of(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *context = reinterpret_cast<CUcontext>(stream_of(handle)->context);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *flags = stream->blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamGetPriority(CUstream handle, int* priority) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult error = refuse_in_capture(stream.get())) return error;
    if (stream->legacy) enqueue(stream, [] {});  // it waits for the blocking streams too
    run_until({stream, stream->last});
    return current()->sticky;
}

EXPORTED CUresult cuStreamQuery(CUstream handle) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult error = refuse_in_capture(stream.get())) return error;
    return query({stream, stream->last}, stream->asked);
}

EXPORTED CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int) {
    ENTER(CONTEXT);
    auto stream = stream_of(handle);
    auto event = event_of(event_handle);
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    enqueue(stream, [] {}, event->recorded);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuEventCreate(CUevent* handle, unsigned int) {
    ENTER(CONTEXT);
    auto event = std::make_shared<Event>();
    event->context = current();
    driver().events[event.get()] = event;
    *handle = reinterpret_cast<CUevent>(event.get());
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuEventDestroy(CUevent handle) {
    ENTER(HEALTHY);
    return driver().events.erase(reinterpret_cast<Event*>(handle)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORTED CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    ENTER(CONTEXT);
    auto event = event_of(handle);
    auto stream = stream_of(stream_handle);
    if (event == nullptr || stream == nullptr || event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) return refuse_in_capture(stream.get());  // a graph of several streams: not emulated
    enqueue(stream, [] {});
    event->recorded = {stream, stream->last};
    event->asked = 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuEventQuery(CUevent handle) {
    ENTER(CONTEXT);
    auto event = event_of(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult error = refuse_in_capture()) return error;
    return query(event->recorded, event->asked);
}

EXPORTED CUresult cuEventSynchronize(CUevent handle) {
    ENTER(CONTEXT);
    auto event = event_of(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult error = refuse_in_capture()) return error;
    if (event->recorded.stream != nullptr) run_until(event->recorded);
    return current()->sticky;
}
