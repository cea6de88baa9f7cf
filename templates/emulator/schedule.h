// Runs the threads of a block, in an order drawn from the launch's seed.
//
// There are two schedules. Free: any thread that can continue may be next, and is interrupted after a few basic blocks
// or many. In lockstep, to count: the lanes of a warp that are at the same instruction run together, those at the
// lowest address first, so that lanes meet again after a branch or a loop, as they do on a GPU.
#pragma once

#include "traffic.h"
#include "wait.h"

namespace simt {

inline void fibre_main() {
    m.kernel->call(m.launch->arguments);
    m.current->state = State::EXITED;
    abandon();
}

// Lets a thread run until it waits, ends, is interrupted or has a bug, and then wakes the threads that may continue.
inline void run_thread(Thread& thread) {
    m.current = &thread;
    switch_context(m.scheduler, thread.context);
    m.current = nullptr;
    if (m.failed || thread.state == State::READY) return;
    m.warp_steps[thread.warp] = 0;
    if (thread.state == State::EXITED) {
        --m.live;
        settle_ended(thread);
        settle_barrier();
    } else if (thread.state == State::AT_BARRIER) {
        ++m.waiting;
        settle_barrier();
    } else if (thread.state == State::AT_WARP_OP) {
        m.at_activemask += thread.op == WarpOp::ACTIVE;
        settle_warp_op(thread);
    }
    settle_active(thread);
}

inline uint32_t draw(uint32_t below) { return static_cast<uint32_t>(m.random() >> 32) % below; }

inline void run_free() {
    std::vector<uint32_t> ready(m.threads.size());
    for (uint32_t i = 0; i < ready.size(); ++i) ready[i] = i;
    while (!m.failed) {
        ready.insert(ready.end(), m.awake.begin(), m.awake.end());
        m.awake.clear();
        if (ready.empty()) {
            if (m.live > 0) report_stuck();
            return;
        }
        const uint32_t at = draw(static_cast<uint32_t>(ready.size()));
        Thread& thread = m.threads[ready[at]];
        m.quantum = 1u << draw(14);
        // The thread is not in the list while it runs: a barrier that it completes puts it back with the others.
        ready[at] = ready.back();
        ready.pop_back();
        run_thread(thread);
        if (m.failed) return;
        if (thread.state == State::READY &&
            (m.awake.empty() || std::find(m.awake.begin(), m.awake.end(), thread.number) == m.awake.end()))
            ready.push_back(thread.number);
    }
}

// Runs one step of a warp. False: none of its lanes can continue.
inline bool step_warp(uint32_t warp) {
    Thread* group[LANES];
    uint32_t size = 0;
    // A lane that spins until another lane of its warp has done something would always be first. So after a while, any
    // lane may be.
    const Thread* chosen = nullptr;
    if (++m.warp_steps[warp] > m.patience[warp]) {
        m.patience[warp] = LITTLE_PATIENCE;
        chosen = &m.threads[warp * LANES + draw(LANES) % (m.threads.size() - warp * LANES)];
    }
    if (chosen && chosen->state != State::READY) chosen = nullptr;
    const uint32_t end = std::min<uint32_t>((warp + 1) * LANES, static_cast<uint32_t>(m.threads.size()));
    for (uint32_t number = warp * LANES; number < end; ++number) {
        Thread& thread = m.threads[number];
        if (thread.state != State::READY) continue;
        const int order = chosen ? compare_places(thread, *chosen) != 0 : size ? compare_places(thread, *group[0]) : 0;
        if (order < 0) size = 0;
        if (order <= 0) group[size++] = &thread;
    }
    if (size == 0) return false;
    if (group[0]->access.any) count_instruction(group, size);
    for (uint32_t i = 0; i < size && !m.failed; ++i) {
        group[i]->access.any = false;
        run_thread(*group[i]);
    }
    m.awake.clear();
    return true;
}

inline void run_lockstep() {
    const uint32_t warps = static_cast<uint32_t>((m.threads.size() + LANES - 1) / LANES);
    std::vector<uint32_t> order(warps);
    for (uint32_t i = 0; i < warps; ++i) order[i] = i;
    while (!m.failed && m.live > 0) {
        std::shuffle(order.begin(), order.end(), m.random);
        bool moved = false;
        for (uint32_t warp : order) {
            for (uint32_t steps = 1 + draw(64); steps > 0 && !m.failed && step_warp(warp); --steps) moved = true;
        }
        if (!moved && !m.failed && m.live > 0) return report_stuck();
    }
}

// Fills shared memory with garbage, because a new block may find anything there.
inline void scramble(uintptr_t begin, uintptr_t end) { std::memset(reinterpret_cast<void*>(begin), 0xa5, end - begin); }

inline void run_block(uint32_t number) {
    m.block_index = block_at(number);
    const uint32_t first = new_segments();
    m.block_segment = m.barrier_segment = first;
    m.block_segments.push_back(first);
    m.block_numbers.push_back(number);
    std::fill(m.last_sync.begin(), m.last_sync.end(), 0u);
    for (const SharedVariable& variable : m.shared_variables) scramble(variable.begin, variable.end);
    scramble(m.dynamic_shadow.begin, m.dynamic_shadow.begin + m.launch->dynamic_shared);
    std::fill(m.static_defined.begin(), m.static_defined.end(), uint8_t{0});
    std::fill(m.dynamic_defined.begin(), m.dynamic_defined.begin() + m.launch->dynamic_shared, uint8_t{0});
    m.live = static_cast<uint32_t>(m.threads.size());
    m.waiting = m.at_activemask = 0;
    m.steps = 0;
    m.warp_steps.assign((m.threads.size() + LANES - 1) / LANES, 0);
    m.patience.assign(m.warp_steps.size(), PATIENCE);
    m.held = m.pending = false;
    m.awake.clear();
    for (Thread& thread : m.threads) {
        thread.state = State::READY;
        thread.segment = first + thread.number;
        thread.pc = 0;
        thread.depth = 0;
        thread.access = {};
        make_context(thread.context, thread.stack, fibre_main);
    }
    if (m.counting) run_lockstep();
    else run_free();
}

}  // namespace simt
