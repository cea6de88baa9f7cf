// Barriers and warp operations: threads wait until all that
// take part have arrived. A thread that never arrives is a bug.
#pragma once

#include <algorithm>

#include "memory.h"

namespace simt {

inline const char* name_of(WarpOp op) {
    static const char* const NAMES[] = {
        "__syncwarp",        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",
        "__ballot_sync",     "__any_sync",        "__all_sync",        "__match_any_sync",  "__activemask",
        "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
        "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync"};
    return NAMES[static_cast<int>(op)];
}

inline void wake(Thread& thread) {
    thread.state = State::READY;
    m.awake.push_back(thread.number);
}

// ---- barriers of the block ----

inline void release_barrier() {
    int votes = 0;
    uint32_t present = 0;
    for (const Thread& thread : m.threads)
        if (thread.state == State::AT_BARRIER) votes += thread.value != 0, ++present;
    const uint32_t first = new_segments();
    m.barrier_segment = first;
    m.waiting = 0;
    ++m.counters.barriers;
    for (Thread& thread : m.threads) {
        if (thread.state != State::AT_BARRIER) continue;
        thread.segment = first + thread.number;
        thread.result = static_cast<uint64_t>(thread.barrier == BarrierOp::OR    ? votes > 0
                                              : thread.barrier == BarrierOp::AND ? votes == static_cast<int>(present)
                                                                                 : votes);
        wake(thread);
    }
}

// Called when a thread has reached a barrier or its end. Barriers do not wait for threads that have ended.
inline void settle_barrier() {
    if (m.waiting == 0 || m.waiting < m.live) return;
    const Thread* first = nullptr;
    for (const Thread& thread : m.threads) {
        if (thread.state != State::AT_BARRIER) continue;
        if (!first) first = &thread;
        if (thread.barrier == first->barrier && compare_places(thread, *first) == 0) continue;
        report_bug(
            thread, "divergent-barrier", thread.pc,
            "waits at the barrier of line %u while thread %u of its block waits at that of line %u; a barrier must "
            "be reached by all threads of a block or by none",
            thread.line, first->number, first->line);
        m.report->has_other = 1;
        fill_place(m.report->other, m.block_index, first->index, offset_of(first->pc));
        return;
    }
    release_barrier();
}

// ---- operations of a warp ----

inline Thread* lane_of(const Thread& thread, uint32_t lane) {
    const uint32_t number = thread.warp * LANES + lane;
    return number < m.threads.size() ? &m.threads[number] : nullptr;
}

// Whether a lane waits at the operation at which another waits:
// the same one with the same mask, anywhere in the source.
inline bool waits_with(const Thread& other, const Thread& thread) {
    return other.state == State::AT_WARP_OP && other.op == thread.op && other.mask == thread.mask;
}

// The lanes in a thread's mask that have not ended.
inline uint32_t present_lanes(const Thread& thread) {
    uint32_t present = 0;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const Thread* other = lane_of(thread, lane);
        if (other && (thread.mask >> lane & 1u) && other->state != State::EXITED) present |= 1u << lane;
    }
    return present;
}

inline int source_lane(const Thread& thread) {
    const int lane = static_cast<int>(thread.lane), width = thread.width, begin = lane / width * width;
    int source = lane;
    if (thread.op == WarpOp::SHUFFLE) return begin + (thread.source & (width - 1));
    if (thread.op == WarpOp::SHUFFLE_UP) source = lane - thread.source;
    if (thread.op == WarpOp::SHUFFLE_DOWN) source = lane + thread.source;
    if (thread.op == WarpOp::SHUFFLE_XOR) source = lane ^ thread.source;
    // A source outside of the lane's part of the warp is replaced
    // by the lane itself; xor may also read an earlier part.
    const bool inside =
        thread.op == WarpOp::SHUFFLE_XOR ? source < begin + width : source >= begin && source < begin + width;
    return inside ? source : lane;
}

inline uint64_t reduced(const Thread& thread, uint32_t mask) {
    uint64_t result = 0;
    bool first = true;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(mask >> lane & 1u)) continue;
        const uint64_t value = lane_of(thread, lane)->value;
        const int32_t a = static_cast<int32_t>(result), b = static_cast<int32_t>(value);
        switch (thread.op) {
        case WarpOp::BALLOT:
        case WarpOp::ACTIVE: result |= static_cast<uint64_t>(value != 0) << lane; break;
        case WarpOp::ANY:
        case WarpOp::OR: result |= value; break;
        case WarpOp::ALL:
        case WarpOp::AND: result = first ? value : result & value; break;
        case WarpOp::MATCH_ANY: result |= static_cast<uint64_t>(value == thread.value) << lane; break;
        case WarpOp::ADD: result = static_cast<uint32_t>(result + value); break;
        case WarpOp::MIN: result = first ? value : std::min(result, value); break;
        case WarpOp::MAX: result = first ? value : std::max(result, value); break;
        case WarpOp::MIN_SIGNED: result = static_cast<uint32_t>(first ? b : std::min(a, b)); break;
        case WarpOp::MAX_SIGNED: result = static_cast<uint32_t>(first ? b : std::max(a, b)); break;
        case WarpOp::XOR: result ^= value; break;
        default: break;
        }
        first = false;
    }
    return result;
}

inline bool is_shuffle(WarpOp op) { return op >= WarpOp::SHUFFLE && op <= WarpOp::SHUFFLE_XOR; }

// Gives every lane of the mask its result and lets it continue.
inline void complete_warp_op(Thread& thread, uint32_t mask) {
    uint64_t results[LANES] = {};
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(mask >> lane & 1u)) continue;
        Thread& member = *lane_of(thread, lane);
        if (!is_shuffle(member.op)) {
            results[lane] = reduced(member, mask);
            continue;
        }
        const int source = source_lane(member);
        if (!(mask >> source & 1u)) {
            report_bug(member, "absent-lane", member.pc,
                       "%s with mask %#x reads lane %d, which %s: the value is undefined", name_of(member.op),
                       member.mask, source, member.mask >> source & 1u ? "has ended" : "is not in it");
            return;
        }
        results[lane] = lane_of(thread, static_cast<uint32_t>(source))->value;
    }
    ++m.counters.warp_syncs;
    const bool orders_memory = thread.op == WarpOp::SYNC;
    const uint32_t first = orders_memory ? new_segments() : 0;
    uint32_t known[LANES] = {};  // segments that are past for any of the lanes are now past for all of them
    if (orders_memory) {
        for (uint32_t lane = 0; lane < LANES; ++lane) {
            const uint32_t* synced = &m.last_sync[(thread.warp * LANES + lane) * LANES];
            for (uint32_t other = 0; other < LANES && (mask >> lane & 1u); ++other)
                known[other] = std::max(known[other], synced[other]);
        }
        for (uint32_t lane = 0; lane < LANES; ++lane)
            if (mask >> lane & 1u) known[lane] = first;
    }
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(mask >> lane & 1u)) continue;
        Thread& member = *lane_of(thread, lane);
        member.result = results[lane];
        if (orders_memory) {
            member.segment = first + member.number;
            std::copy(known, known + LANES, &m.last_sync[(member.warp * LANES + lane) * LANES]);
        }
        wake(member);
    }
}

// Called when a thread has reached a warp operation.
inline void settle_warp_op(Thread& thread) {
    if (thread.op == WarpOp::ACTIVE) return;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const Thread* other = lane_of(thread, lane);
        if ((thread.mask >> lane & 1u) && other && other->state != State::EXITED && !waits_with(*other, thread)) return;
    }
    complete_warp_op(thread, present_lanes(thread));
}

// Called when a thread of the warp has stopped. If no lane can continue, the lanes at __activemask are the active ones.
inline void settle_active(const Thread& stopped) {
    if (m.at_activemask == 0) return;
    Thread* first = nullptr;
    uint32_t mask = 0;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        Thread* other = lane_of(stopped, lane);
        if (!other) continue;
        if (other->state == State::READY) return;
        if (other->state != State::AT_WARP_OP || other->op != WarpOp::ACTIVE) continue;
        if (!first) first = other;
        if (other->line == first->line) mask |= 1u << lane;
    }
    if (!first) return;
    m.at_activemask -= static_cast<uint32_t>(__builtin_popcount(mask));
    complete_warp_op(*first, mask);
}

// Called when a thread has ended: other threads of its warp may have waited for it.
inline void settle_ended(const Thread& ended) {
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        Thread* other = lane_of(ended, lane);
        if (other && other->state == State::AT_WARP_OP) settle_warp_op(*other);
    }
}

// ---- no thread can continue ----

inline void report_absent_lane(const Thread& thread) {
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(thread.mask >> lane & 1u)) continue;
        const Thread* other = lane_of(thread, lane);
        if (other && waits_with(*other, thread)) continue;
        const char* kind = "absent-lane";
        if (!other || other->state == State::EXITED) continue;
        if (other->state == State::AT_BARRIER) {
            report_bug(thread, kind, thread.pc,
                       "%s with mask %#x waits for lane %u, which waits at the barrier of line %u", name_of(thread.op),
                       thread.mask, lane, other->line);
        } else {
            report_bug(thread, kind, thread.pc,
                       "%s with mask %#x waits for lane %u, which waits at %s of line %u with mask %#x",
                       name_of(thread.op), thread.mask, lane, name_of(other->op), other->line, other->mask);
        }
        m.report->has_other = 1;
        fill_place(m.report->other, m.block_index, other->index, offset_of(other->pc));
        return;
    }
}

// Reports why no thread can continue.
inline void report_stuck() {
    if (report_pending()) return;
    for (const Thread& thread : m.threads) {
        if (thread.state != State::AT_WARP_OP) continue;
        report_absent_lane(thread);
        break;
    }
    // For every other reason: a block whose threads have not all ended is not done.
    for (const Thread& thread : m.threads)
        if (thread.state != State::EXITED)
            return report_bug(thread, "deadlock", thread.pc, "waits at line %u, and no thread of the block can run",
                              thread.line);
}

}  // namespace simt
