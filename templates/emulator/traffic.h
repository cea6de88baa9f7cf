// Counts what the memory instructions of a warp cost, as the source issues them.
#pragma once

#include <algorithm>

#include "machine.h"

namespace simt {

constexpr uintptr_t SECTOR = 32, BANKS = 32, BANK_BYTES = 4;

// Adds the global memory that lanes of one instruction touch: sectors, and bytes that any lane asks for.
inline void count_global(const Thread* const* lanes, uint32_t count, SimtTraffic& traffic) {
    std::pair<uintptr_t, uintptr_t> ranges[LANES];
    for (uint32_t i = 0; i < count; ++i)
        ranges[i] = {lanes[i]->access.address, lanes[i]->access.address + lanes[i]->access.bytes};
    std::sort(ranges, ranges + count);
    uintptr_t sector = 0, byte = 0;  // the first that are not counted yet
    for (uint32_t i = 0; i < count; ++i) {
        const auto [begin, end] = ranges[i];
        const uintptr_t first = std::max(sector, begin / SECTOR), last = (end - 1) / SECTOR;
        if (last + 1 > first) traffic.sectors += last + 1 - first, sector = last + 1;
        const uintptr_t from = std::max(byte, begin);
        if (end > from) traffic.useful += end - from, byte = end;
    }
}

// Adds what lanes of one instruction touch of shared memory, which serves 128 bytes at a time, one word per bank. Lanes
// that access different words of the same bank wait.
inline void count_shared(const Thread* const* lanes, uint32_t count, SimtTraffic& traffic) {
    const uint32_t bytes = lanes[0]->access.bytes;
    const uint32_t at_once = std::max<uint32_t>(1, bytes <= BANK_BYTES ? LANES : LANES * BANK_BYTES / bytes);
    for (uint32_t from = 0; from < LANES; from += at_once) {
        uintptr_t words[LANES * 8];
        uint32_t touched = 0;
        for (uint32_t i = 0; i < count; ++i) {
            const Thread& thread = *lanes[i];
            if (thread.lane < from || thread.lane >= from + at_once) continue;
            const uintptr_t first = thread.access.address / BANK_BYTES,
                            last = (thread.access.address + thread.access.bytes - 1) / BANK_BYTES;
            for (uintptr_t word = first; word <= last && touched < LANES * 8; ++word) words[touched++] = word;
        }
        if (touched == 0) continue;
        std::sort(words, words + touched);
        touched = static_cast<uint32_t>(std::unique(words, words + touched) - words);
        uint32_t load[BANKS] = {}, most = 0;
        for (uint32_t i = 0; i < touched; ++i) most = std::max(most, ++load[words[i] % BANKS]);
        traffic.sectors += most;
        traffic.useful += touched * BANK_BYTES;
        m.counters.bank_conflicts += most - (touched + BANKS - 1) / BANKS;
    }
}

// Counts the accesses of the lanes of an instruction to one region, or to shared memory.
inline void count_part(const Thread* const* lanes, uint32_t count) {
    const Access& access = lanes[0]->access;
    if (is_atomic(access.kind)) {
        ++m.counters.atomics;
        m.counters.atomic_lanes += count;
        return;
    }
    const bool store = writes(access.kind), shared = access.region == IN_SHARED;
    SimtTraffic& traffic = shared ? (store ? m.counters.shared_stores : m.counters.shared_loads)
                                  : (store ? m.stores : m.loads)[static_cast<size_t>(access.region)];
    ++traffic.instructions;
    traffic.lanes += count;
    for (uint32_t i = 0; i < count; ++i) traffic.bytes += lanes[i]->access.bytes;
    if (shared) {
        count_shared(lanes, count, traffic);
    } else {
        count_global(lanes, count, traffic);
        if (!store) m.region_of_site[lanes[0]->pc] = access.region;
    }
}

// Counts one instruction of a warp: the access at which all these lanes are.
inline void count_instruction(Thread* const* group, uint32_t size) {
    bool any = false, counted[LANES] = {};
    for (uint32_t i = 0; i < size; ++i) {
        const Access& access = group[i]->access;
        any = any || access.active;
        if (!access.active || counted[i] || access.region == NOWHERE) continue;
        const Thread* part[LANES];
        uint32_t count = 0;
        for (uint32_t j = i; j < size; ++j) {
            if (!group[j]->access.active || group[j]->access.region != access.region) continue;
            part[count++] = group[j];
            counted[j] = true;
        }
        count_part(part, count);
    }
    if (any) return;
    const auto known = m.region_of_site.find(group[0]->pc);
    if (known != m.region_of_site.end()) ++m.loads[static_cast<size_t>(known->second)].idle;
}

}  // namespace simt
