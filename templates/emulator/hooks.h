// The functions that the compiler makes kernels call: before every access to memory
// (-fsanitize=thread), at the start of every basic block (-fsanitize-coverage=trace-pc)
// and for every index into an array of known size (-fsanitize=bounds).
#pragma once

#include "schedule.h"

namespace simt {

inline void access_memory(uintptr_t address, size_t bytes, Kind kind, bool aligned, bool active, uintptr_t pc) {
    Thread* thread = m.current;
    if (!thread) return;
    int where = NOWHERE;
    if (active && !check_access(*thread, address, bytes, kind, aligned, pc, where)) abandon();
    if (!m.counting || (active && where == NOWHERE)) return;
    thread->pc = pc;
    thread->access = {address, static_cast<uint32_t>(bytes), kind, true, active, where};
    pause();
}

inline void enter_basic_block(uintptr_t pc) {
    Thread* thread = m.current;
    if (!thread || m.held) return;
    if (++m.steps > m.most_steps) {
        if (!report_pending())
            report_bug(*thread, "endless", pc,
                       "the block has not ended after %llu basic blocks: an endless loop, or a wait for "
                       "something that never happens",
                       static_cast<unsigned long long>(m.most_steps));
        abandon();
    }
    if (m.counting) {
        thread->pc = pc;
        thread->access.any = false;
        pause();
    } else if (--m.quantum == 0) {
        pause();
    }
}

}  // namespace simt

#define SIMT_PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define SIMT_HOOK(name, bytes, kind, aligned)                                                                       \
    void name(void* address) {                                                                                      \
        simt::access_memory(reinterpret_cast<uintptr_t>(address), bytes, simt::Kind::kind, aligned, true, SIMT_PC); \
    }
#define SIMT_HOOKS(bytes)                                                         \
    SIMT_HOOK(__tsan_read##bytes, bytes, READ, true)                              \
    SIMT_HOOK(__tsan_write##bytes, bytes, WRITE, true)                            \
    SIMT_HOOK(__tsan_unaligned_read##bytes, bytes, READ, false)                   \
    SIMT_HOOK(__tsan_unaligned_write##bytes, bytes, WRITE, false)                 \
    SIMT_HOOK(__tsan_volatile_read##bytes, bytes, VOLATILE_READ, true)            \
    SIMT_HOOK(__tsan_volatile_write##bytes, bytes, VOLATILE_WRITE, true)          \
    SIMT_HOOK(__tsan_unaligned_volatile_read##bytes, bytes, VOLATILE_READ, false) \
    SIMT_HOOK(__tsan_unaligned_volatile_write##bytes, bytes, VOLATILE_WRITE, false)

extern "C" {
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_read_range(void* address, size_t bytes) {
    simt::access_memory(reinterpret_cast<uintptr_t>(address), bytes, simt::Kind::READ, false, true, SIMT_PC);
}
void __tsan_write_range(void* address, size_t bytes) {
    simt::access_memory(reinterpret_cast<uintptr_t>(address), bytes, simt::Kind::WRITE, false, true, SIMT_PC);
}

void __tsan_func_entry(void* call_site) {
    simt::Thread* thread = simt::m.current;
    if (!thread) return;
    if (thread->depth < simt::MOST_CALLS) thread->calls[thread->depth] = reinterpret_cast<uintptr_t>(call_site);
    ++thread->depth;
    const char* here = static_cast<const char*>(__builtin_frame_address(0));
    if (here - thread->stack < static_cast<ptrdiff_t>(simt::STACK_RESERVE)) {
        simt::report_bug(*thread, "stack-overflow", SIMT_PC, "%u calls deep, with less than %zu bytes of stack left",
                         thread->depth, simt::STACK_RESERVE);
        simt::abandon();
    }
}
void __tsan_func_exit() {
    if (simt::m.current) --simt::m.current->depth;
}

void __sanitizer_cov_trace_pc() { simt::enter_basic_block(SIMT_PC); }

// The compiler's records that the functions below get, as far as they are read here.
struct SimtSourceLocation {
    const char* file;
    uint32_t line, column;
};
struct SimtTypeName {
    uint16_t kind, info;
    char name[1];
};
struct SimtBounds {
    SimtSourceLocation place;
    const SimtTypeName* array;
    const SimtTypeName* index;
};
struct SimtMismatch {
    SimtSourceLocation place;
    const SimtTypeName* type;
    uint8_t log_alignment, kind;
};

void __ubsan_handle_out_of_bounds(SimtBounds* data, uintptr_t index) {
    simt::Thread* thread = simt::m.current;
    if (!thread) return;
    simt::report_bug(*thread, "out-of-bounds", SIMT_PC, "index %lld is outside of its array, of type %s",
                     static_cast<long long>(static_cast<intptr_t>(index)), data->array->name);
    simt::abandon();
}

void __ubsan_handle_type_mismatch_v1(SimtMismatch* data, uintptr_t address) {
    simt::Thread* thread = simt::m.current;
    if (!thread) return;
    simt::report_bug(*thread, "misaligned", SIMT_PC, "an object of type %s at %#llx, which is not a multiple of %u",
                     data->type->name, static_cast<unsigned long long>(address), 1u << data->log_alignment);
    simt::abandon();
}

void __ubsan_handle_divrem_overflow(void*, uintptr_t left, uintptr_t right) {
    simt::Thread* thread = simt::m.current;
    if (!thread) return;
    simt::report_bug(*thread, "bad-division", SIMT_PC, "divides %lld by %lld", static_cast<long long>(left),
                     static_cast<long long>(right));
    simt::abandon();
}
}
