// A thread of a block is a fibre, which has a stack of its own. To switch to another fibre takes a few nanoseconds.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#if !defined(__x86_64__) || defined(SIMT_PORTABLE_FIBRES)
#define SIMT_UCONTEXT 1
#include <ucontext.h>
#endif

namespace simt {

constexpr size_t STACK_BYTES = 1024 * 1024;
constexpr size_t STACK_RESERVE = 64 * 1024;  // bytes of each stack for the executor itself

#ifdef SIMT_UCONTEXT

struct Context {
    ucontext_t state;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

inline void make_context(Context& context, char* stack, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = STACK_BYTES;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}

#else

// swapcontext asks the kernel for the signal mask at every switch; this only keeps the registers that the calling
// convention says must be kept.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
    .text
    .globl simt_switch
    .hidden simt_switch
    .type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size simt_switch, .-simt_switch
)");

struct Context {
    void* stack_pointer;
};

inline void switch_context(Context& from, Context& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

inline void make_context(Context& context, char* stack, void (*entry)()) {
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack + STACK_BYTES);
    top[-1] = 0;                                   // nowhere to return to
    top[-2] = reinterpret_cast<uintptr_t>(entry);  // where the first switch returns to
    for (int saved = 3; saved <= 8; ++saved) top[-saved] = 0;
    context.stack_pointer = top - 8;
}

#endif

// Allocates the stacks of all threads of a block, with a page below each that must not be touched. The system provides
// memory for pages when they are first used.
inline char* allocate_stacks(size_t count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), each = STACK_BYTES + page;
    void* memory =
        mmap(nullptr, count * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    for (size_t i = 0; i < count; ++i) {
        if (mprotect(static_cast<char*>(memory) + i * each, page, PROT_NONE)) {
            munmap(memory, count * each);
            return nullptr;
        }
    }
    return static_cast<char*>(memory);
}

inline void free_stacks(char* stacks, size_t count) {
    if (stacks) munmap(stacks, count * (STACK_BYTES + static_cast<size_t>(sysconf(_SC_PAGESIZE))));
}

inline char* stack_of(char* stacks, size_t number) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return stacks + number * (STACK_BYTES + page) + page;
}

}  // namespace simt
