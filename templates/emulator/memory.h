// Checks of every access: bounds, alignment, whether it was ever written, and races.
//
// The barriers that a thread passes cut its life into segments. Segments are numbered in the order in which they begin,
// with one range of numbers for all threads of the block, so a number identifies the thread. Two accesses in one block
// are ordered if both threads passed a barrier between them: if the number of the earlier segment is below that of the
// first segment after the barrier. Different blocks of a launch are never ordered.
#pragma once

#include "machine.h"

namespace simt {

inline uint32_t new_segments() {
    const uint32_t first = m.next_segment;
    if (first > ~uint32_t{0} - MOST_THREADS)
        report_bug(m.threads[0], "too-long", 0, "more barriers than one launch can number");
    m.next_segment += static_cast<uint32_t>(m.threads.size());
    return first;
}

inline const char* verb(Kind kind) { return is_atomic(kind) ? "changes" : writes(kind) ? "writes" : "reads"; }

inline uint32_t thread_of(uint32_t segment) {
    const auto after = std::upper_bound(m.block_segments.begin(), m.block_segments.end(), segment);
    return (segment - *(after - 1)) % static_cast<uint32_t>(m.threads.size());
}

inline uint32_t block_of(uint32_t segment) {
    const auto after = std::upper_bound(m.block_segments.begin(), m.block_segments.end(), segment);
    return m.block_numbers[static_cast<size_t>(after - m.block_segments.begin()) - 1];
}

// Whether everything in the segment is known to have happened before what the running thread does now.
inline bool is_before(uint32_t segment, const Thread& thread, bool shared) {
    if (segment == thread.segment) return true;
    if (segment < m.block_segment) return shared || segment == 0;  // another block, which has its own shared memory
    if (segment < m.barrier_segment) return true;
    const uint32_t other = (segment - m.block_segment) % static_cast<uint32_t>(m.threads.size());
    if (other == thread.number) return true;
    if (other / LANES != thread.warp) return false;
    return segment < m.last_sync[(thread.warp * LANES + thread.lane) * LANES + other % LANES];
}

inline void report_race(const Thread& thread, Mark other, const char* then, Kind kind, size_t bytes, const char* what,
                        uintptr_t pc) {
    report_bug(thread, "race", pc, "%s %zu bytes at %s that another thread %s%s, with no barrier between them",
               verb(kind), bytes, what, then, other.place & STRONG ? " by an atomic or volatile access" : "");
    m.report->has_other = 1;
    fill_place(m.report->other, block_at(block_of(other.segment)), thread_at(thread_of(other.segment)),
               other.place & ~STRONG);
}

// An address as text for messages: "`values`+128 (of 512 bytes)", "the shared variable of line 812, byte 64 (of 256)".
inline const char* named(char (&text)[160], const Region* region, const SharedVariable* variable, uintptr_t address) {
    if (region) {
        std::snprintf(text, sizeof text, "`%s`+%llu (of %llu bytes)", region->name,
                      static_cast<unsigned long long>(address - region->shadow.begin),
                      static_cast<unsigned long long>(region->shadow.bytes));
    } else if (variable) {
        std::snprintf(text, sizeof text, "the shared variable of line %u, byte %llu (of %llu)", variable->line,
                      static_cast<unsigned long long>(address - variable->begin),
                      static_cast<unsigned long long>(variable->end - variable->begin));
    } else {
        std::snprintf(text, sizeof text, "dynamic shared memory, byte %llu (of %u)",
                      static_cast<unsigned long long>(address - m.dynamic_shadow.begin), m.launch->dynamic_shared);
    }
    return text;
}

// Whether the access that a mark is about is not ordered with that of the running thread, and not both are strong.
inline bool conflicts(Mark mark, const Thread& thread, bool strong, bool shared) {
    return mark.segment && !(strong && (mark.place & STRONG)) && !is_before(mark.segment, thread, shared);
}

inline void note_read(Reads& reads, const Thread& thread, Mark mine, bool shared) {
    if (reads.first.segment == 0 || is_before(reads.first.segment, thread, shared)) {
        if (reads.last.segment && is_before(reads.last.segment, thread, shared)) reads.last = {};
        reads.first = mine;
    } else {
        reads.last = mine;
    }
}

// Looks for a race, and records the access. False: a bug was reported.
inline bool check_race(const Thread& thread, Shadow& shadow, uintptr_t address, size_t bytes, Kind kind,
                       const Region* region, const SharedVariable* variable, uintptr_t pc) {
    const bool strong = is_strong(kind), shared = !region;
    const Mark mine = {thread.segment, offset_of(pc) | (strong ? STRONG : 0)};
    Mark* const writes_of = shadow.writes + (address - shadow.begin);
    Reads* const reads_of = shadow.reads + (address - shadow.begin);
    Mark clear = {};  // the last mark that did not conflict: bytes next to each other usually have the same mark
    for (size_t i = 0; i < bytes; ++i) {
        const Mark write = writes_of[i];
        if (write.segment && (write.segment != clear.segment || write.place != clear.place)) {
            if (conflicts(write, thread, strong, shared)) {
                char text[160];
                report_race(thread, write, "wrote", kind, bytes, named(text, region, variable, address), pc);
                return false;
            }
            clear = write;
        }
        Reads& reads = reads_of[i];
        if (!writes(kind)) {
            note_read(reads, thread, mine, shared);
            continue;
        }
        if (reads.first.segment) {
            for (const Mark read : {reads.first, reads.last}) {
                if (!conflicts(read, thread, strong, shared)) continue;
                char text[160];
                report_race(thread, read, "read", kind, bytes, named(text, region, variable, address), pc);
                return false;
            }
            reads = {};
        }
        // An atomic write does not hide an earlier plain write of
        // the same thread, which may still conflict with others.
        const bool plain_before = write.segment == thread.segment && !(write.place & STRONG);
        writes_of[i] = strong && plain_before ? write : mine;
    }
    return true;
}

// Whether a read takes undefined bytes. Structures have padding, which is never written but read by every copy, so only
// words, and copies, that are undefined as a whole count.
inline bool is_undefined(const uint8_t* defined, size_t bytes, bool scalar) {
    if (!std::memchr(defined, 0, bytes)) return false;
    const size_t part = scalar && bytes > 4 ? 4 : bytes;
    for (size_t at = 0; at < bytes; at += part)
        if (std::all_of(defined + at, defined + at + part, [](uint8_t byte) { return byte == 0; })) return true;
    return false;
}

// Checks a read for bytes that were never written. If the writer is only late, this is a race, whose report says more:
// so the thread halts, does nothing with undefined bytes, and its report waits until no other thread can continue.
// False: it halts.
inline bool check_defined(Thread& thread, const Shadow& shadow, uintptr_t address, size_t bytes, bool scalar,
                          const Region* region, const SharedVariable* variable, uintptr_t pc) {
    if (!is_undefined(shadow.defined + (address - shadow.begin), bytes, scalar)) return true;
    thread.state = State::HALTED;
    if (m.pending) return false;
    char text[160];
    m.pending = true;
    fill_report(m.pending_report, thread, "uninitialised", pc);
    std::snprintf(m.pending_report.message, sizeof m.pending_report.message,
                  "reads %zu bytes at %s, where nothing has been written", bytes,
                  named(text, region, variable, address));
    return false;
}

inline Region* region_at(uintptr_t address) {
    if (m.regions.empty()) return nullptr;
    Region* last = &m.regions[m.last_region];
    if (address - last->shadow.begin < last->shadow.bytes) return last;
    size_t low = 0, high = m.regions.size();  // the last region that begins at or before the address
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (m.regions[middle].shadow.begin <= address) low = middle;
        else high = middle;
    }
    m.last_region = low;
    return &m.regions[low];
}

inline void report_outside(const Thread& thread, uintptr_t address, size_t bytes, Kind kind, uintptr_t pc) {
    const Region* best = nullptr;
    uintptr_t distance = ~uintptr_t{0};
    bool past_end = false;
    for (const Region& region : m.regions) {
        const uintptr_t end = region.shadow.begin + region.shadow.bytes;
        const bool after = address + bytes > end;
        const uintptr_t apart = after ? address + bytes - end : region.shadow.begin - address;
        if (apart < distance) best = &region, distance = apart, past_end = after;
    }
    if (address < 4096) {
        report_bug(thread, "out-of-bounds", pc, "%s %zu bytes at address %llu: a null pointer", verb(kind), bytes,
                   static_cast<unsigned long long>(address));
    } else if (best && distance < (uintptr_t{1} << 32)) {
        report_bug(thread, "out-of-bounds", pc, "%s %zu bytes that reach %llu bytes %s `%s` (of %llu bytes)",
                   verb(kind), bytes, static_cast<unsigned long long>(distance),
                   past_end ? "past the end of" : "before the start of", best->name,
                   static_cast<unsigned long long>(best->shadow.bytes));
    } else {
        report_bug(thread, "out-of-bounds", pc, "%s %zu bytes at %#llx, which is not memory of this launch", verb(kind),
                   bytes, static_cast<unsigned long long>(address));
    }
}

// Checks an access within a range of memory. An `aligned` access is one instruction, of a power of two of bytes.
inline bool check_shadow(Thread& thread, Shadow& shadow, uintptr_t address, size_t bytes, Kind kind, bool aligned,
                         const Region* region, const SharedVariable* variable, uintptr_t pc) {
    char text[160];
    if (aligned && address & (bytes - 1)) {
        report_bug(thread, "misaligned", pc, "%s %zu bytes at %s, which is not a multiple of %zu", verb(kind), bytes,
                   named(text, region, variable, address), bytes);
        return false;
    }
    if (shadow.writes && !check_race(thread, shadow, address, bytes, kind, region, variable, pc)) return false;
    if (shadow.defined && reads(kind) && !check_defined(thread, shadow, address, bytes, aligned, region, variable, pc))
        return false;
    if (shadow.defined && writes(kind)) std::memset(shadow.defined + (address - shadow.begin), 1, bytes);
    return true;
}

inline bool check_shared(Thread& thread, uintptr_t address, size_t bytes, Kind kind, bool aligned, uintptr_t pc) {
    const SharedVariable* nearest = nullptr;
    for (const SharedVariable& variable : m.shared_variables) {
        if (address >= variable.begin && address + bytes <= variable.end)
            return check_shadow(thread, m.static_shadow, address, bytes, kind, aligned, nullptr, &variable, pc);
        if (variable.begin <= address && (!nearest || variable.begin > nearest->begin)) nearest = &variable;
    }
    report_bug(thread, "out-of-bounds", pc,
               "%s %zu bytes that reach %llu bytes past the shared variable of line %u (of %llu bytes)", verb(kind),
               bytes, static_cast<unsigned long long>(nearest ? address + bytes - nearest->end : 0),
               nearest ? nearest->line : 0,
               static_cast<unsigned long long>(nearest ? nearest->end - nearest->begin : 0));
    return false;
}

// Does all checks of an access, and finds its region: NOWHERE for what is not memory of the device. False: the thread
// must not continue.
inline bool check_access(Thread& thread, uintptr_t address, size_t bytes, Kind kind, bool aligned, uintptr_t pc,
                         int& where) {
    where = NOWHERE;
    if (address - reinterpret_cast<uintptr_t>(thread.stack) < STACK_BYTES) return true;  // the thread's own variables
    if (address - m.static_shadow.begin < m.static_shadow.bytes) {
        where = IN_SHARED;
        return check_shared(thread, address, bytes, kind, aligned, pc);
    }
    if (address - m.dynamic_shadow.begin < m.dynamic_shadow.bytes) {
        where = IN_SHARED;
        const uintptr_t end = m.dynamic_shadow.begin + m.launch->dynamic_shared;
        if (address + bytes <= end)
            return check_shadow(thread, m.dynamic_shadow, address, bytes, kind, aligned, nullptr, nullptr, pc);
        report_bug(thread, "out-of-bounds", pc,
                   "%s %zu bytes that reach %llu bytes past the %u bytes of dynamic shared memory of the launch",
                   verb(kind), bytes, static_cast<unsigned long long>(address + bytes - end), m.launch->dynamic_shared);
        return false;
    }
    Region* region = region_at(address);
    if (region && address >= region->shadow.begin && address + bytes <= region->shadow.begin + region->shadow.bytes) {
        where = region->number;
        if (writes(kind) && !region->writable) {
            report_bug(thread, "read-only", pc, "%s %zu bytes of `%s`, which the kernel may only read", verb(kind),
                       bytes, region->name);
            return false;
        }
        return check_shadow(thread, region->shadow, address, bytes, kind, aligned, region, nullptr, pc);
    }
    if (address >= m.image_begin && address + bytes <= m.image_end) {
        const bool constant = !writes(kind) && (address + bytes <= m.variables_begin || address >= m.variables_end);
        if (constant) return true;
        report_bug(thread, "out-of-bounds", pc,
                   "%s %zu bytes that are not memory of this launch; __device__ variables, and shared variables "
                   "in templates, cannot be checked: pass a buffer, or declare shared memory in the kernel",
                   verb(kind), bytes);
        return false;
    }
    if ((m.launch->flags & SIMT_OPEN_MEMORY) && address >= 4096) {
        if (!aligned || (address & (bytes - 1)) == 0) return true;
        report_bug(thread, "misaligned", pc, "%s %zu bytes at %#llx, which is not a multiple of %zu", verb(kind), bytes,
                   static_cast<unsigned long long>(address), bytes);
        return false;
    }
    report_outside(thread, address, bytes, kind, pc);
    return false;
}

}  // namespace simt
