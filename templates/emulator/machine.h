// The state of a launch: one block at a time, its threads, and what has to be known about memory.
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
constexpr uint32_t MOST_SHARED = 227 * 1024;  // of any architecture; who launches knows what the image's own has
// Steps of a warp in lockstep in which some lane waits or ends, mostly; and fewer once it was seen to spin.
constexpr uint32_t PATIENCE = 1 << 16, LITTLE_PATIENCE = 1 << 6;
constexpr uint32_t MOST_STATIC_SHARED = 48 * 1024;

// Basic blocks that a block may run for each of its threads (few threads: together): seconds, whatever it waits for.
constexpr uint64_t MOST_STEPS = uint64_t{1} << 20, MOST_STEPS_OF_FEW = uint64_t{1} << 25;
constexpr uint64_t MOST_STEPS_IN_LOCKSTEP = uint64_t{1} << 17, MOST_STEPS_OF_FEW_IN_LOCKSTEP = uint64_t{1} << 23;

enum class State : uint8_t { READY, AT_BARRIER, AT_WARP_OP, HALTED, EXITED };
enum class Kind : uint8_t { READ, WRITE, ATOMIC, EXCHANGE, VOLATILE_READ, VOLATILE_WRITE };
inline bool writes(Kind kind) { return kind != Kind::READ && kind != Kind::VOLATILE_READ; }
inline bool reads(Kind kind) { return kind == Kind::READ || kind == Kind::ATOMIC || kind == Kind::VOLATILE_READ; }
inline bool is_atomic(Kind kind) { return kind == Kind::ATOMIC || kind == Kind::EXCHANGE; }
inline bool is_strong(Kind kind) { return kind != Kind::READ && kind != Kind::WRITE; }

constexpr int IN_SHARED = -1, NOWHERE = -2;

// A memory instruction that a lane is about to execute; in lockstep the warp's lanes wait for each other here.
struct Access {
    uintptr_t address;
    uint32_t bytes;
    Kind kind;
    bool any;     // the lane stands at an access at all
    bool active;  // false: predicated off
    int region;   // or IN_SHARED, NOWHERE
};

struct Thread {
    Context context;
    char* stack;
    Index index;
    uint32_t number, lane, warp;
    State state;
    uint32_t segment;  // of the thread's life between two barriers, see memory.h

    // Where it waits, and for what.
    uintptr_t pc;
    uint32_t line, mask;
    BarrierOp barrier;
    WarpOp op;
    uint64_t value, result;
    int source, width;

    // Where it stands, for the order in lockstep: call sites from the outermost function on.
    Access access;
    uint32_t depth;
    uintptr_t calls[MOST_CALLS];
};

// An access of a byte: who, and which instruction of the image. An atomic or volatile one is marked as strong.
struct Mark {
    uint32_t segment;  // 0: nobody
    uint32_t place;
};
constexpr uint32_t STRONG = uint32_t{1} << 31;

// Reads of a byte that no barrier has put into the past: the first, and the last by another thread.
struct Reads {
    Mark first, last;
};

// What is known of a range of memory, byte by byte.
struct Shadow {
    uintptr_t begin, bytes;
    Mark* writes;  // null: nobody may write, so there is no race
    Reads* reads;
    uint8_t* defined;  // null: all of it is
};

struct Region {
    const char* name;
    bool writable;
    int number;  // in the launch
    Shadow shadow;
};

// Zeros from the system, which costs no memory until it is touched.
template <class T>
class Zeros {
  public:
    Zeros() = default;
    explicit Zeros(size_t count) : bytes_(count * sizeof(T)) {
        if (bytes_ == 0) return;
        void* found = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T*>(found);
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
    bool pending;  // a report that waits for a better one, see `check_defined`
    SimtReport pending_report;
    std::mt19937_64 random;

    char* stacks;
    Context scheduler;
    std::vector<Thread> threads;
    Thread* current;
    Index block_size, grid_size, block_index;
    uint64_t steps, most_steps;
    uint32_t quantum, live, waiting, asking;  // asking: at __activemask
    std::vector<uint32_t> warp_steps, patience;
    std::vector<uint32_t> awake;  // threads that became ready while another ran

    uint32_t next_segment, block_segment, barrier_segment;
    std::vector<uint32_t> block_segments;  // first segment of each block run so far, and the block
    std::vector<uint32_t> block_numbers;
    std::vector<uint32_t> last_sync;  // [warp][lane][lane]: segments before it are ordered between the two lanes

    uintptr_t image_begin, image_end;          // as it lies in memory ...
    uintptr_t variables_begin, variables_end;  // ... and what in it may change

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
    static std::vector<Kernel> all;  // filled by the image's own static constructors, whichever run first
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

// The waiting report becomes the launch's, if there is one.
inline bool report_pending() {
    if (!m.pending || m.failed) return false;
    *m.report = m.pending_report;
    m.failed = true;
    return true;
}

// Order of two threads' places: by call site from the outermost function on, then by instruction.
inline int compare_places(const Thread& a, const Thread& b) {
    for (uint32_t level = 0;; ++level) {
        const bool a_ends = level >= a.depth || level >= MOST_CALLS, b_ends = level >= b.depth || level >= MOST_CALLS;
        const uintptr_t x = a_ends ? a.pc : a.calls[level], y = b_ends ? b.pc : b.calls[level];
        if (x != y) return x < y ? -1 : 1;
        if (a_ends || b_ends) return a_ends == b_ends ? 0 : a_ends ? -1 : 1;
    }
}

// Writes the report of a bug at a thread's place; the launch is over.
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
