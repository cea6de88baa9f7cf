// The state of a launch: the block that runs, its threads, and what is known about memory.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"
#include "fibre.h"
#include "runtime.h"

namespace simt {

constexpr uint32_t LANES = 32, MOST_THREADS = 1024, MOST_CALLS = 48;
constexpr uint32_t MOST_SHARED = 227 * 1024;  // the most of any architecture; launchers know that of the image's own
// Steps of a warp in lockstep within which some lane usually waits or ends; fewer after the warp was seen to spin.
constexpr uint32_t PATIENCE = 1 << 16, LITTLE_PATIENCE = 1 << 6;
constexpr uint32_t MOST_STATIC_SHARED = 48 * 1024;

// The basic blocks that a block may run for each of its threads (if it has few threads: in total), which takes seconds.
constexpr uint64_t MOST_STEPS = uint64_t{1} << 20, MOST_STEPS_OF_FEW = uint64_t{1} << 25;
constexpr uint64_t MOST_STEPS_IN_LOCKSTEP = uint64_t{1} << 17, MOST_STEPS_OF_FEW_IN_LOCKSTEP = uint64_t{1} << 23;

enum class State : uint8_t { READY, AT_BARRIER, AT_WARP_OP, HALTED, EXITED };
enum class Kind : uint8_t { READ, WRITE, ATOMIC, EXCHANGE, VOLATILE_READ, VOLATILE_WRITE };
inline bool writes(Kind kind) { return kind != Kind::READ && kind != Kind::VOLATILE_READ; }
inline bool reads(Kind kind) { return kind == Kind::READ || kind == Kind::ATOMIC || kind == Kind::VOLATILE_READ; }
inline bool is_atomic(Kind kind) { return kind == Kind::ATOMIC || kind == Kind::EXCHANGE; }
inline bool is_strong(Kind kind) { return kind != Kind::READ && kind != Kind::WRITE; }

constexpr int IN_SHARED = -1, NOWHERE = -2;

// A memory instruction that a lane is about to execute. In lockstep, the lanes of a warp wait for each other here.
struct Access {
    uintptr_t address;
    uint32_t bytes;
    Kind kind;
    bool any;     // whether the lane is at an access at all
    bool active;  // false: predicated off
    int region;   // the region's number, IN_SHARED or NOWHERE
};

struct Thread {
    Context context;
    char* stack;
    Index index;
    uint32_t number, lane, warp;
    State state;
    uint32_t segment;  // the current part of the thread's life between two barriers: see memory.h

    // Where the thread waits, and for what.
    uintptr_t pc;
    uint32_t line, mask;
    BarrierOp barrier;
    WarpOp op;
    uint64_t value, result;
    int source, width;

    // Where the thread is, for the order in lockstep: call sites, from the outermost function on.
    Access access;
    uint32_t depth;
    uintptr_t calls[MOST_CALLS];
};

// An access of a byte: the segment of a thread, and the instruction
// in the image. Atomic and volatile accesses are STRONG.
struct Mark {
    uint32_t segment;  // 0: there was no access
    uint32_t place;
};
constexpr uint32_t STRONG = uint32_t{1} << 31;

// The reads of a byte since the last barrier: the first, and the last by another thread.
struct Reads {
    Mark first, last;
};

// What is known about a range of memory, byte by byte.
struct Shadow {
    uintptr_t begin, bytes;
    Mark* writes;  // null: kernels may not write, so there is no race
    Reads* reads;
    uint8_t* defined;  // null: all bytes are defined
};

struct Region {
    const char* name;
    bool writable;
    int number;  // the position in the launch's regions
    Shadow shadow;
};

// An array of zeros from the system, which takes no memory until it is used.
template <class T>
class Zeros {
  public:
    Zeros() = default;
    explicit Zeros(size_t count) : bytes_(count * sizeof(T)) {
        if (bytes_ == 0) return;
        void* pages = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T*>(pages);
    }
    Zeros(Zeros&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Zeros& operator=(Zeros&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Zeros() {
        if (data_) munmap(data_, bytes_);
    }
    T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    size_t bytes_ = 0;
};

struct SharedVariable {
    uintptr_t begin, end;
    const char* function;
    uint32_t line;
};

struct Machine {
    const SimtLaunch* launch;
    const Kernel* kernel;
    SimtReport* report;
    bool failed, counting, held;
    bool pending;  // whether a report waits for a better one: see `check_defined`
    SimtReport pending_report;
    std::mt19937_64 random;

    char* stacks;
    Context scheduler;
    std::vector<Thread> threads;
    Thread* current;
    Index block_size, grid_size, block_index;
    uint64_t steps, most_steps;
    uint32_t quantum, live, waiting, at_activemask;  // the last three count threads
    std::vector<uint32_t> warp_steps, patience;
    std::vector<uint32_t> awake;  // threads that became ready while another ran

    uint32_t next_segment, block_segment, barrier_segment;
    std::vector<uint32_t> block_segments;  // the first segment of each block that has run ...
    std::vector<uint32_t> block_numbers;   // ... and the number of that block
    std::vector<uint32_t> last_sync;  // [warp][lane][lane]: segments before this are ordered between the two lanes

    uintptr_t image_begin, image_end;          // where the image is in memory ...
    uintptr_t variables_begin, variables_end;  // ... and the part of it that may change

    std::vector<Region> regions;  // by address
    size_t last_region;
    std::vector<SharedVariable> shared_variables;
    std::vector<char> dynamic_shared;
    Shadow static_shadow, dynamic_shadow;
    Zeros<Mark> static_writes, dynamic_writes;
    Zeros<Reads> static_reads, dynamic_reads;
    std::vector<uint8_t> static_defined, dynamic_defined;

    SimtCounters counters;
    std::vector<SimtTraffic> loads, stores;
    std::unordered_map<uintptr_t, int> region_of_site;
};

static Machine m;
static std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;  // the image's own static constructors fill it, in any order
    return all;
}

extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));
inline uintptr_t image_begin() { return reinterpret_cast<uintptr_t>(__ehdr_start); }
inline uint32_t offset_of(uintptr_t pc) { return pc ? static_cast<uint32_t>(pc - 1 - image_begin()) : 0; }

inline void fill_place(SimtPlace& place, Index block, Index thread, uint64_t offset) {
    const uint32_t b[3] = {block.x, block.y, block.z}, t[3] = {thread.x, thread.y, thread.z};
    std::memcpy(place.block, b, sizeof b);
    std::memcpy(place.thread, t, sizeof t);
    place.offset = offset;
}

inline Index thread_at(uint32_t number) {
    const Index size = m.block_size;
    return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

inline Index block_at(uint32_t number) {
    const Index size = m.grid_size;
    return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

inline void fill_report(SimtReport& report, const Thread& thread, const char* kind, uintptr_t pc) {
    std::memset(&report, 0, sizeof report);
    std::snprintf(report.kind, sizeof report.kind, "%s", kind);
    std::snprintf(report.kernel, sizeof report.kernel, "%s", m.kernel->name);
    fill_place(report.place, m.block_index, thread.index, offset_of(pc));
}

// Makes the report that waits, if there is one, the report of the launch.
inline bool report_pending() {
    if (!m.pending || m.failed) return false;
    *m.report = m.pending_report;
    m.failed = true;
    return true;
}

// Compares where two threads are: by call sites, from the outermost function on, then by instruction.
inline int compare_places(const Thread& a, const Thread& b) {
    for (uint32_t level = 0;; ++level) {
        const bool a_ends = level >= a.depth || level >= MOST_CALLS, b_ends = level >= b.depth || level >= MOST_CALLS;
        const uintptr_t x = a_ends ? a.pc : a.calls[level], y = b_ends ? b.pc : b.calls[level];
        if (x != y) return x < y ? -1 : 1;
        if (a_ends || b_ends) return a_ends == b_ends ? 0 : a_ends ? -1 : 1;
    }
}

// Writes the report of a bug where a thread is, which ends the launch.
__attribute__((format(printf, 4, 5))) inline void report_bug(const Thread& thread, const char* kind, uintptr_t pc,
                                                             const char* format, ...) {
    if (m.failed) return;
    m.failed = true;
    fill_report(*m.report, thread, kind, pc);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(m.report->message, sizeof m.report->message, format, arguments);
    va_end(arguments);
}

// Leaves the running fibre for good.
[[noreturn]] inline void abandon() {
    Thread* thread = m.current;
    for (;;) switch_context(thread->context, m.scheduler);
}

inline void pause() {
    Thread* thread = m.current;
    switch_context(thread->context, m.scheduler);
}

}  // namespace simt
