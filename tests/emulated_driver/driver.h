// A stand-in for libcuda.so.1 whose devices are this CPU: they run SIMT images (templates/emulator) as if they were cubins.
//
// Only for tests. Work waits in its stream until a caller synchronises with it, so that a launch on a wrong stream, a
// missing wait or memory given back too early changes results as it would on a GPU that is late.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace emulated {

// What every device is: what a multiprocessor holds, as codegen/targets/cuda/arch.py has it, and what tests may change.
struct Facts {
    int arch = 0;
    int threads = 0, blocks = 0, shared = 0, shared_reserved = 0;
    int version = CUDA_VERSION;
    size_t memory = size_t{1} << 30;  // of each device
    uint64_t patience = 1;  // how often a query of unfinished work says "not ready" before the work is done
    uint64_t seed = 0;      // of the first kernel's schedule

    int shared_optin() const { return shared - shared_reserved; }
};

constexpr int DEVICES = 2;
constexpr int SHARED_WITHOUT_OPTIN = 48 * 1024;
constexpr int MOST_THREADS = 1024;

struct Stream;

// The point after one piece of work in a stream.
struct Point {
    std::shared_ptr<Stream> stream;
    uint64_t sequence = 0;
};

struct Work {
    uint64_t sequence;  // counts all work of the device
    std::function<void()> run;
    Point after;  // to be reached before it; of another stream, or none
};

struct Graph {
    std::vector<std::function<void()>> works;
};

struct Context;

struct Stream {
    Context* context = nullptr;
    bool blocking = true;  // takes turns with the legacy default stream
    bool legacy = false;
    int priority = 0;
    uint64_t last = 0;      // sequence of the newest work
    uint64_t finished = 0;  // all up to here is done
    uint64_t asked = 0;     // queries since work was last done
    std::deque<Work> queue;
    std::unique_ptr<Graph> capture;  // while it is captured
    bool capture_broken = false;
};

struct Event {
    Context* context = nullptr;
    Point recorded;
    uint64_t asked = 0;
};

// The primary context of a device: there are no others.
struct Context {
    int device = 0;
    int references = 0;
    CUresult sticky = CUDA_SUCCESS;  // after a kernel failed, every call returns this
    size_t used = 0;                 // bytes of memory
    std::shared_ptr<Stream> legacy, per_thread;
};

struct Kernel;

struct Library {
    int (*launch)(const SimtLaunch*, SimtReport*) = nullptr;
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

struct Kernel {
    std::shared_ptr<Library> library;  // pending launches keep their image
    std::string name;
    std::vector<uint32_t> argument_bytes;
    uint32_t static_shared;
    uint32_t max_threads;
    int dynamic_shared[DEVICES];  // most that a launch may ask for
};

struct Allocation {
    Context* context;
    std::unique_ptr<uint8_t[]> memory;  // more than asked: to align, and to keep allocations apart
    uint64_t begin;
    size_t bytes;
    std::unique_ptr<uint8_t[]> defined;  // a byte for each: nonzero once it was written
};

struct Driver {
    std::recursive_mutex mutex;
    Facts facts;
    bool initialised = false;
    Context contexts[DEVICES];
    std::string report;  // what a kernel did wrong
    uint64_t launches = 0, runs = 0;  // of kernels: accepted, begun

    uint64_t sequence = 0;
    std::map<Stream*, std::shared_ptr<Stream>> streams;  // that a caller may name
    std::set<std::shared_ptr<Stream>> retired;           // destroyed, with work left
    std::map<Event*, std::shared_ptr<Event>> events;
    std::map<Library*, std::shared_ptr<Library>> libraries;
    std::set<Kernel*> kernels;
    std::map<uint64_t, Allocation> allocations;           // by address
    std::map<uint64_t, std::unique_ptr<uint8_t[]>> host;  // pinned
    std::map<uint64_t, size_t> host_bytes;
    std::map<Graph*, std::shared_ptr<Graph>> graphs;
    std::map<Graph*, std::shared_ptr<Graph>> executables;
};

Driver& driver();

// Held for the length of a call. `error` is what to answer at once: not initialised, no context, a kernel went wrong.
class Call {
public:
    enum Needs { NOTHING, INITIALISED, HEALTHY, CONTEXT };
    explicit Call(Needs needs);
    CUresult error = CUDA_SUCCESS;

private:
    std::lock_guard<std::recursive_mutex> lock_;
};

#define ENTER(needs)                                 \
    emulated::Call call_(emulated::Call::needs);     \
    if (call_.error != CUDA_SUCCESS) return call_.error

// The context of this thread; null if it has none.
Context* current();

// Null for a handle that names no stream. The default streams are those of the current context.
std::shared_ptr<Stream> stream_of(CUstream handle);
bool finished(const Point& point);
void run_until(const Point& point);
void run_all(Context& context);
std::vector<std::shared_ptr<Stream>> streams_of(const Context& context);
// Puts work after all that the stream has, or into the graph that it is captured into.
void enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> run, Point after = {});
// What a call must answer that waits for, or asks about, what a capture has not done. It breaks the capture.
CUresult refuse_in_capture(Stream* only = nullptr);

void run_kernel(Context& context, const Kernel& kernel, const CUlaunchConfig& config,
                std::vector<std::vector<uint8_t>>& arguments);

// The allocation that holds the address, or null.
Allocation* allocation_of(uint64_t address);
void set_defined(uint64_t address, size_t bytes);

// Why this library must not replace a driver under that root directory ("" is the machine's); empty if it may.
std::string refusal(const std::string& root);

using Function = void (*)();
struct Entry {
    const char* name;
    int version;  // of CUDA, since which the name means this function
    Function function;
};
const std::vector<Entry>& entries();

}  // namespace emulated
