// The executor: everything in an image except for its kernels. It is compiled once and linked into every image.
#include <link.h>

#include <algorithm>

#include "language.h"
#include "vectors.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hooks.h"

#ifndef SIMT_EXPORT
#define SIMT_EXPORT __attribute__((visibility("default")))
#endif

extern "C" const char __start_simt_shared[] __attribute__((weak, visibility("hidden")));
extern "C" const char __stop_simt_shared[] __attribute__((weak, visibility("hidden")));
extern "C" const char simt_image_arch[];  // codegen/targets/simt/image.py defines it

namespace simt {

Index thread_index() { return m.current->index; }
Index block_index() { return m.block_index; }
Index block_size() { return m.block_size; }
Index grid_size() { return m.grid_size; }
void* dynamic_shared() { return reinterpret_cast<void*>(m.dynamic_shadow.begin); }
void register_kernel(const Kernel& kernel) { kernels().push_back(kernel); }
float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
uint16_t float_to_half(float value) { return __half_as_ushort(__float2half_rn(value)); }
uint16_t float_to_bf16(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }

void trap(uint32_t line) {
    report_bug(*m.current, "trap", SIMT_PC, "__trap() of line %u", line);
    abandon();
}

int barrier(BarrierOp op, int vote, uint32_t line) {
    Thread& thread = *m.current;
    thread.pc = SIMT_PC;
    thread.line = line;
    thread.barrier = op;
    thread.value = static_cast<uint64_t>(vote);
    thread.access.any = false;
    thread.state = State::AT_BARRIER;
    pause();
    return static_cast<int>(thread.result);
}

uint64_t warp(WarpOp op, uint32_t mask, uint64_t value, int source, int width, uint32_t line) {
    Thread& thread = *m.current;
    thread.pc = SIMT_PC;
    thread.line = line;
    thread.op = op;
    thread.mask = mask;
    thread.value = value;
    thread.width = width;
    thread.access.any = false;
    if (!(mask >> thread.lane & 1u)) {
        report_bug(thread, "absent-lane", thread.pc, "%s with mask %#x is called by lane %u, which is not in it",
                   name_of(op), mask, thread.lane);
        abandon();
    }
    if (source < 0 || source > 31) {
        if (op == WarpOp::SHUFFLE) {
            source &= 31;
        } else {
            report_bug(thread, "bad-distance", thread.pc, "%s over %d lanes; allowed: 0 to 31", name_of(op), source);
            abandon();
        }
    }
    thread.source = source;
    if (width < 1 || width > 32 || (width & (width - 1))) {
        report_bug(thread, "bad-width", thread.pc, "%s with width %d; allowed: 1, 2, 4, 8, 16, 32", name_of(op), width);
        abandon();
    }
    thread.state = State::AT_WARP_OP;
    pause();
    return thread.result;
}

void load(void* into, const void* address, size_t bytes, bool active) {
    access_memory(reinterpret_cast<uintptr_t>(address), bytes, Kind::READ, true, active, SIMT_PC);
    if (active) std::memcpy(into, address, bytes);
}

void store(void* address, const void* from, size_t bytes) {
    access_memory(reinterpret_cast<uintptr_t>(address), bytes, Kind::WRITE, true, true, SIMT_PC);
    std::memcpy(address, from, bytes);
}

// The bytes that one instruction moves: at most 16, and no more than a vector's type is aligned to.
static size_t instruction_bytes(size_t bytes, size_t alignment) { return std::min({bytes, alignment, size_t{16}}); }

void load_vector(void* into, const void* address, size_t bytes, size_t alignment) {
    const size_t part = instruction_bytes(bytes, alignment);
    for (size_t at = 0; at < bytes; at += part)
        access_memory(reinterpret_cast<uintptr_t>(address) + at, part, Kind::READ, true, true, SIMT_PC);
    std::memcpy(into, address, bytes);
}

void store_vector(void* address, const void* from, size_t bytes, size_t alignment) {
    const size_t part = instruction_bytes(bytes, alignment);
    for (size_t at = 0; at < bytes; at += part)
        access_memory(reinterpret_cast<uintptr_t>(address) + at, part, Kind::WRITE, true, true, SIMT_PC);
    std::memcpy(address, from, bytes);
}

void begin_atomic(void* address, void* old, size_t bytes, bool exchange) {
    access_memory(reinterpret_cast<uintptr_t>(address), bytes, exchange ? Kind::EXCHANGE : Kind::ATOMIC, true, true,
                  SIMT_PC);
    m.held = true;
    std::memcpy(old, address, bytes);
}

void end_atomic(void* address, const void* value, size_t bytes) {
    std::memcpy(address, value, bytes);
    m.held = false;
}

// Finds the image's shared variables by the marks around them.
static std::vector<SharedVariable> find_shared_variables() {
    static const char BEGIN[] = SIMT_BEGIN_MAGIC, END[] = SIMT_END_MAGIC;
    std::vector<SharedVariable> variables;
    const char* const stop = __stop_simt_shared;
    const auto next = [&](const char* from, const char(&magic)[32]) {
        return std::search(from, stop, magic, magic + 32);
    };
    for (const char* at = next(__start_simt_shared, BEGIN); at != stop; at = next(at, BEGIN)) {
        const SharedBegin* mark = reinterpret_cast<const SharedBegin*>(at);
        const char* begin = at + sizeof(SharedBegin);
        at = next(begin, END);
        variables.push_back({reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(at), mark->function,
                             static_cast<uint32_t>(mark->line)});
    }
    return variables;
}

static uint64_t static_shared_of(const Kernel& kernel) {
    uint64_t bytes = 0;
    for (const SharedVariable& variable : find_shared_variables())
        if (!std::strcmp(variable.function, kernel.name)) bytes += variable.end - variable.begin;
    return bytes;
}

static bool is_kernel(const char* function) {
    return std::any_of(kernels().begin(), kernels().end(),
                       [&](const Kernel& k) { return !std::strcmp(k.name, function); });
}

static void prepare_shared() {
    m.shared_variables.clear();
    for (const SharedVariable& variable : find_shared_variables())
        if (!std::strcmp(variable.function, m.kernel->name) || !is_kernel(variable.function))
            m.shared_variables.push_back(variable);
    if (m.dynamic_shared.empty()) m.dynamic_shared.resize(MOST_SHARED + 1024 + 128);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(__start_simt_shared),
                    end = reinterpret_cast<uintptr_t>(__stop_simt_shared);
    const uintptr_t dynamic = (reinterpret_cast<uintptr_t>(m.dynamic_shared.data()) + 127) & ~uintptr_t{127};
    const auto set = [](Shadow& shadow, Zeros<Mark>& writes, Zeros<Reads>& reads, std::vector<uint8_t>& defined,
                        uintptr_t from, uintptr_t to) {
        writes = Zeros<Mark>(to - from);
        reads = Zeros<Reads>(to - from);
        defined.assign(to - from, 0);
        shadow = {from, to - from, writes.data(), reads.data(), defined.data()};
    };
    set(m.static_shadow, m.static_writes, m.static_reads, m.static_defined, begin, end);
    set(m.dynamic_shadow, m.dynamic_writes, m.dynamic_reads, m.dynamic_defined, dynamic, dynamic + MOST_SHARED + 1024);
}

struct Marks {
    Zeros<Mark> writes;
    Zeros<Reads> reads;
};

static void prepare_regions(const SimtLaunch& launch, std::vector<Marks>& marks) {
    m.regions.clear();
    m.last_region = 0;
    for (uint32_t i = 0; i < launch.region_count; ++i) {
        const SimtRegion& range = launch.regions[i];
        if (range.bytes == 0) continue;
        Region region{range.name,
                      range.writable != 0,
                      static_cast<int>(i),
                      {range.begin, range.bytes, nullptr, nullptr, range.defined}};
        if (range.writable) {
            marks.push_back({Zeros<Mark>(range.bytes), Zeros<Reads>(range.bytes)});
            region.shadow.writes = marks.back().writes.data();
            region.shadow.reads = marks.back().reads.data();
        }
        m.regions.push_back(region);
    }
    std::sort(m.regions.begin(), m.regions.end(),
              [](const Region& a, const Region& b) { return a.shadow.begin < b.shadow.begin; });
}

// Finds where the image is in memory, and its variables: what may be written, except for what was only relocated.
static int find_image(dl_phdr_info* info, size_t, void*) {
    if (info->dlpi_addr != m.image_begin) return 0;
    uintptr_t relocated_end = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& part = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part.p_vaddr, end = begin + part.p_memsz;
        if (part.p_type == PT_GNU_RELRO) relocated_end = end;
        if (part.p_type != PT_LOAD) continue;
        m.image_end = std::max(m.image_end, end);
        if (part.p_flags & PF_W) m.variables_begin = begin, m.variables_end = end;
    }
    m.variables_begin = std::max(m.variables_begin, relocated_end);
    return 1;
}

static bool refuse(SimtReport& report, const char* format, const char* name, unsigned long long value,
                   unsigned long long allowed) {
    std::snprintf(report.kind, sizeof report.kind, "launch");
    std::snprintf(report.kernel, sizeof report.kernel, "%s", name);
    std::snprintf(report.message, sizeof report.message, format, value, allowed);
    return false;
}

static bool check_launch(const SimtLaunch& launch, SimtReport& report) {
    m.kernel = nullptr;
    for (const Kernel& kernel : kernels())
        if (!std::strcmp(kernel.name, launch.kernel)) m.kernel = &kernel;
    if (!m.kernel)
        return refuse(report, "no such kernel in the image, which has %llu", launch.kernel, kernels().size(), 0);
    const uint64_t threads = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
    const uint64_t blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    static constexpr uint64_t BLOCK[] = {1024, 1024, 64}, GRID[] = {(1ull << 31) - 1, 65535, 65535};
    for (int axis = 0; axis < 3; ++axis) {
        if (launch.block[axis] > BLOCK[axis])
            return refuse(report, "%llu threads along one axis of a block; allowed: %llu", launch.kernel,
                          launch.block[axis], BLOCK[axis]);
        if (launch.grid[axis] > GRID[axis])
            return refuse(report, "%llu blocks along one axis of the grid; allowed: %llu", launch.kernel,
                          launch.grid[axis], GRID[axis]);
    }
    if (threads == 0 || threads > m.kernel->max_threads)
        return refuse(report, "%llu threads per block; allowed: 1 to %llu", launch.kernel, threads,
                      m.kernel->max_threads);
    if (blocks == 0 || blocks >> 31)
        return refuse(report, "%llu blocks; allowed: 1 to %llu", launch.kernel, blocks, (1ull << 31) - 1);
    const uint64_t fixed = static_shared_of(*m.kernel);
    if (fixed > MOST_STATIC_SHARED)
        return refuse(report, "%llu bytes of static shared memory; allowed: %llu", launch.kernel, fixed,
                      MOST_STATIC_SHARED);
    if (fixed + launch.dynamic_shared > MOST_SHARED)
        return refuse(report, "%llu bytes of shared memory; allowed: %llu", launch.kernel,
                      fixed + launch.dynamic_shared, MOST_SHARED);
    return true;
}

static void prepare_threads(const SimtLaunch& launch) {
    m.block_size = {launch.block[0], launch.block[1], launch.block[2]};
    m.grid_size = {launch.grid[0], launch.grid[1], launch.grid[2]};
    m.threads.assign(size_t{launch.block[0]} * launch.block[1] * launch.block[2], Thread{});
    m.stacks = allocate_stacks(m.threads.size());
    for (uint32_t i = 0; i < m.threads.size(); ++i) {
        Thread& thread = m.threads[i];
        thread.stack = stack_of(m.stacks, i);
        thread.index = thread_at(i);
        thread.number = i;
        thread.lane = i % LANES;
        thread.warp = i / LANES;
    }
    m.last_sync.assign((m.threads.size() + LANES - 1) / LANES * LANES * LANES, 0);
}

static int run(const SimtLaunch& launch, SimtReport& report) {
    std::memset(&report, 0, sizeof report);
    if (!check_launch(launch, report)) return 2;
    std::vector<Marks> marks;
    m.launch = &launch;
    m.report = &report;
    m.failed = false;
    m.counting = launch.flags & SIMT_COUNT;
    m.random.seed(launch.seed);
    m.next_segment = 1;
    m.block_segments.clear();
    m.block_numbers.clear();
    m.counters = {};
    m.loads.assign(launch.region_count, {});
    m.stores.assign(launch.region_count, {});
    m.region_of_site.clear();
    prepare_threads(launch);
    if (!m.stacks) return refuse(report, "no memory for %llu stacks", launch.kernel, m.threads.size(), 0), 2;
    // Stacks are not kept: the page below each is a mapping of its own, and a process has only 65530 of these.
    const struct Stacks {
        ~Stacks() { free_stacks(m.stacks, m.threads.size()); }
    } stacks;
    prepare_shared();
    prepare_regions(launch, marks);
    if (m.image_end == 0) {
        m.image_begin = simt::image_begin();
        dl_iterate_phdr(find_image, nullptr);
    }
    const uint64_t threads = m.threads.size();
    m.most_steps = m.counting ? std::max(MOST_STEPS_OF_FEW_IN_LOCKSTEP, threads * MOST_STEPS_IN_LOCKSTEP)
                              : std::max(MOST_STEPS_OF_FEW, threads * MOST_STEPS);
    std::vector<uint32_t> order(launch.grid[0] * launch.grid[1] * launch.grid[2]);
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), m.random);
    for (uint32_t block : order) {
        run_block(block);
        if (m.failed) return 1;
    }
    return 0;
}

}  // namespace simt

extern "C" {
// copies.h makes memcpy, memmove and memset call these.
void* simt_copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return to;
    simt::access_memory(reinterpret_cast<uintptr_t>(from), bytes, simt::Kind::READ, false, true, SIMT_PC);
    simt::access_memory(reinterpret_cast<uintptr_t>(to), bytes, simt::Kind::WRITE, false, true, SIMT_PC);
    return std::memmove(to, from, bytes);
}

void* simt_fill(void* to, int byte, size_t bytes) {
    if (bytes == 0) return to;
    simt::access_memory(reinterpret_cast<uintptr_t>(to), bytes, simt::Kind::WRITE, false, true, SIMT_PC);
    return std::memset(to, byte, bytes);
}

SIMT_EXPORT int simt_launch(const SimtLaunch* launch, SimtReport* report) {
    try {
        return simt::run(*launch, *report);
    } catch (const std::bad_alloc&) {
        simt::refuse(*report, "no memory to track %llu regions and the grid", launch->kernel,
                     launch->region_count, 0);
        return 2;
    }
}

SIMT_EXPORT void simt_counters(SimtCounters* counters, SimtTraffic* loads, SimtTraffic* stores) {
    *counters = simt::m.counters;
    std::copy(simt::m.loads.begin(), simt::m.loads.end(), loads);
    std::copy(simt::m.stores.begin(), simt::m.stores.end(), stores);
}

SIMT_EXPORT uint32_t simt_kernel_count(void) { return static_cast<uint32_t>(simt::kernels().size()); }

SIMT_EXPORT const SimtKernelInfo* simt_kernel(uint32_t index) {
    static SimtKernelInfo info;
    const simt::Kernel& kernel = simt::kernels()[index];
    const uint64_t shared = simt::static_shared_of(kernel);
    info = {kernel.name, kernel.argument_count, kernel.argument_bytes, static_cast<uint32_t>(shared),
            kernel.max_threads};
    return &info;
}

SIMT_EXPORT const char* simt_arch(void) { return simt_image_arch; }
SIMT_EXPORT uint32_t simt_abi(void) { return SIMT_ABI; }
}
