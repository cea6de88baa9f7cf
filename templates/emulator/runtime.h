// The functions of the executor that CUDA code on the CPU calls. Everything else that a kernel does is plain C++.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

struct Index {
    unsigned x, y, z;
};

enum class WarpOp : uint8_t {
    SYNC,
    SHUFFLE,
    SHUFFLE_UP,
    SHUFFLE_DOWN,
    SHUFFLE_XOR,
    BALLOT,
    ANY,
    ALL,
    MATCH_ANY,
    ACTIVE,
    ADD,
    MIN,
    MAX,
    MIN_SIGNED,
    MAX_SIGNED,
    AND,
    OR,
    XOR,
};
enum class BarrierOp : uint8_t { SYNC, OR, AND, COUNT };

struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    const uint32_t* argument_bytes;
    uint32_t argument_count;
    uint32_t max_threads;
};

// Two marks that nothing may touch are before every shared variable: one directly after the previous variable, and one
// directly before this one.
struct __attribute__((packed)) SharedEnd {
    char magic[32];
};
struct alignas(64) SharedBegin {
    char magic[32];
    const char* function;
    uint64_t line;
    char rest[16];
};
#define SIMT_MAGIC(last)                                                                                              \
    {                                                                                                                 \
        's', 'i', 'm', 't', ' ', 's', 'h', 'a', 'r', 'e', 'd', ' ', 'm', 'e', 'm', 'o', 'r', 'y', 2, 3, 5, 7, 11, 13, \
            17, 19, 23, 29, 31, 37, 41, last                                                                          \
    }
#define SIMT_END_MAGIC SIMT_MAGIC(1)
#define SIMT_BEGIN_MAGIC SIMT_MAGIC(2)

// A fibre is the same thread all its life, so what it reads here never changes.
[[gnu::const]] Index thread_index();
[[gnu::const]] Index block_index();
[[gnu::const]] Index block_size();
[[gnu::const]] Index grid_size();

int barrier(BarrierOp op, int vote, uint32_t line);

// `value` is the lane's operand, `source` a lane number or distance; the result is a word of 64 bits.
uint64_t warp(WarpOp op, uint32_t mask, uint64_t value, int source, int width, uint32_t line);

// Accesses of one instruction: `active` is false for a lane that is predicated off, which gets zeros.
void load(void* into, const void* address, size_t bytes, bool active);
void store(void* address, const void* from, size_t bytes);

// Accesses of a vector. One of more than 16 bytes, or with an alignment below its size, takes several instructions.
void load_vector(void* into, const void* address, size_t bytes, size_t alignment);
void store_vector(void* address, const void* from, size_t bytes, size_t alignment);

// Nothing else runs between these two. `begin_atomic` copies the old value out, `end_atomic` the new one in. An
// exchange does not depend on the old value.
void begin_atomic(void* address, void* old, size_t bytes, bool exchange);
void end_atomic(void* address, const void* value, size_t bytes);

void* dynamic_shared();
[[noreturn]] void trap(uint32_t line);
void register_kernel(const Kernel& kernel);

// Conversions with NVIDIA's own headers.
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);
uint16_t float_to_bf16(float value);

}  // namespace simt
