// The CUDA language for a host compiler: everything that device
// code may name, by functions of the executor or plain C++.
#pragma once

#include "copies.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include "language.h"
#include "runtime.h"
#include "vectors.h"

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())
constexpr int warpSize = 32;

// Every kernel of an image is named once, at the end of its source.
#define SIMT_KERNEL(function, name, max_threads) \
    static const simt::Registered SIMT_JOIN(simt_kernel_, name) { simt::Entry<&function>::kernel(#name, max_threads) }

namespace simt {

template <auto FUNCTION>
struct Entry;

template <class... A, void (*FUNCTION)(A...)>
struct Entry<FUNCTION> {
    static constexpr uint32_t BYTES[sizeof...(A) + 1] = {sizeof(A)...};

    template <size_t... I>
    __attribute__((no_sanitize_thread, noinline)) static void spread(void** arguments, std::index_sequence<I...>) {
        void (*volatile function)(A...) = FUNCTION;  // prevents that it is inlined here, without the checks
        function(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
    }
    static void call(void** arguments) { spread(arguments, std::index_sequence_for<A...>{}); }

    static Kernel kernel(const char* name, uint32_t max_threads) {
        return {name, &call, BYTES, sizeof...(A), max_threads};
    }
};

struct Registered {
    explicit Registered(const Kernel& kernel) { register_kernel(kernel); }
};

template <class T>
inline uint64_t to_word(T value) {
    static_assert(sizeof(T) <= 8, "warp operations take values of up to 8 bytes");
    uint64_t word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    return word;
}

template <class T>
inline T from_word(uint64_t word) {
    T value;
    __builtin_memcpy(&value, &word, sizeof(T));
    return value;
}

template <class T>
inline T read(const T* address) {
    T value;
    load(&value, address, sizeof(T), true);
    return value;
}

// An atomic operation: `change` computes the new value from the old one.
template <class T, class Change>
inline T atomic(T* address, const Change& change, bool exchange = false) {
    T old;
    begin_atomic(address, &old, sizeof(T), exchange);
    const T value = change(old);
    end_atomic(address, &value, sizeof(T));
    return old;
}

template <class T>
struct Same {
    using type = T;
};
template <class T>
using same = typename Same<T>::type;  // not deduced: the address decides the type

}  // namespace simt

// ---- barriers and fences ------------------------------------------------------------------------------------------

#define __syncthreads() ((void)simt::barrier(simt::BarrierOp::SYNC, 0, __LINE__))
#define __syncthreads_or(vote) simt::barrier(simt::BarrierOp::OR, (vote) != 0, __LINE__)
#define __syncthreads_and(vote) simt::barrier(simt::BarrierOp::AND, (vote) != 0, __LINE__)
#define __syncthreads_count(vote) simt::barrier(simt::BarrierOp::COUNT, (vote) != 0, __LINE__)
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
#define __trap() simt::trap(__LINE__)

// ---- warps --------------------------------------------------------------------------------------------------------

namespace simt {
// Warp operations at a line of the source, with their default arguments, for the macros below.
struct Here {
    uint32_t line;
    void sync(uint32_t mask = 0xffffffffu) const { warp(WarpOp::SYNC, mask, 0, 0, 32, line); }
    template <class T>
    T shuffle(WarpOp op, uint32_t mask, T value, int source, int width = 32) const {
        return from_word<T>(warp(op, mask, to_word(value), source, width, line));
    }
    template <class T>
    T reduce(WarpOp op, WarpOp signed_op, uint32_t mask, T value) const {
        return static_cast<T>(
            warp(std::is_signed_v<T> ? signed_op : op, mask, static_cast<uint32_t>(value), 0, 32, line));
    }
    uint32_t vote(WarpOp op, uint32_t mask, int predicate) const {
        return static_cast<uint32_t>(warp(op, mask, predicate != 0, 0, 32, line));
    }
    template <class T>
    uint32_t match(uint32_t mask, T value) const {
        return static_cast<uint32_t>(warp(WarpOp::MATCH_ANY, mask, to_word(value), 0, 32, line));
    }
};
}  // namespace simt

#define SIMT_HERE (simt::Here{__LINE__})
#define __syncwarp(...) SIMT_HERE.sync(__VA_ARGS__)
#define __shfl_sync(mask, ...) SIMT_HERE.shuffle(simt::WarpOp::SHUFFLE, mask, __VA_ARGS__)
#define __shfl_up_sync(mask, ...) SIMT_HERE.shuffle(simt::WarpOp::SHUFFLE_UP, mask, __VA_ARGS__)
#define __shfl_down_sync(mask, ...) SIMT_HERE.shuffle(simt::WarpOp::SHUFFLE_DOWN, mask, __VA_ARGS__)
#define __shfl_xor_sync(mask, ...) SIMT_HERE.shuffle(simt::WarpOp::SHUFFLE_XOR, mask, __VA_ARGS__)
#define __ballot_sync(mask, predicate) SIMT_HERE.vote(simt::WarpOp::BALLOT, mask, predicate)
#define __any_sync(mask, predicate) static_cast<int>(SIMT_HERE.vote(simt::WarpOp::ANY, mask, predicate))
#define __all_sync(mask, predicate) static_cast<int>(SIMT_HERE.vote(simt::WarpOp::ALL, mask, predicate))
#define __match_any_sync(mask, value) SIMT_HERE.match(mask, value)
#define __activemask() SIMT_HERE.vote(simt::WarpOp::ACTIVE, 0xffffffffu, 1)
#define __reduce_add_sync(mask, value) SIMT_HERE.reduce(simt::WarpOp::ADD, simt::WarpOp::ADD, mask, value)
#define __reduce_min_sync(mask, value) SIMT_HERE.reduce(simt::WarpOp::MIN, simt::WarpOp::MIN_SIGNED, mask, value)
#define __reduce_max_sync(mask, value) SIMT_HERE.reduce(simt::WarpOp::MAX, simt::WarpOp::MAX_SIGNED, mask, value)
#define __reduce_and_sync(mask, value) SIMT_HERE.reduce(simt::WarpOp::AND, simt::WarpOp::AND, mask, value)
#define __reduce_or_sync(mask, value) SIMT_HERE.reduce(simt::WarpOp::OR, simt::WarpOp::OR, mask, value)
#define __reduce_xor_sync(mask, value) SIMT_HERE.reduce(simt::WarpOp::XOR, simt::WarpOp::XOR, mask, value)

// ---- memory -------------------------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T* address) {
    return simt::read(address);
}
template <class T>
inline T __ldca(const T* address) {
    return simt::read(address);
}
template <class T>
inline T __ldcg(const T* address) {
    return simt::read(address);
}
template <class T>
inline T __ldcs(const T* address) {
    return simt::read(address);
}
template <class T>
inline T __ldlu(const T* address) {
    return simt::read(address);
}
template <class T>
inline T __ldcv(const T* address) {
    return simt::read(address);
}
template <class T>
inline void __stwb(T* address, T value) {
    simt::store(address, &value, sizeof(T));
}
template <class T>
inline void __stcg(T* address, T value) {
    simt::store(address, &value, sizeof(T));
}
template <class T>
inline void __stcs(T* address, T value) {
    simt::store(address, &value, sizeof(T));
}
template <class T>
inline void __stwt(T* address, T value) {
    simt::store(address, &value, sizeof(T));
}

template <class T>
inline T atomicAdd(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return static_cast<T>(old + v); });
}
template <class T>
inline T atomicSub(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return static_cast<T>(old - v); });
}
template <class T>
inline T atomicExch(T* p, simt::same<T> v) {
    return simt::atomic(
        p, [&](T) { return v; }, true);
}
template <class T>
inline T atomicMin(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return v < old ? v : old; });
}
template <class T>
inline T atomicMax(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return old < v ? v : old; });
}
template <class T>
inline T atomicAnd(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return old & v; });
}
template <class T>
inline T atomicOr(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return old | v; });
}
template <class T>
inline T atomicXor(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return old ^ v; });
}
template <class T>
inline T atomicInc(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return old >= v ? T{0} : static_cast<T>(old + 1); });
}
template <class T>
inline T atomicDec(T* p, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return old == 0 || old > v ? v : static_cast<T>(old - 1); });
}
template <class T>
inline T atomicCAS(T* p, simt::same<T> expected, simt::same<T> v) {
    return simt::atomic(p, [&](T old) { return old == expected ? v : old; });
}

// ---- numbers ------------------------------------------------------------------------------------------------------

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll(static_cast<unsigned long long>(value)) : 64; }
inline unsigned __brev(unsigned value) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) result |= (value >> bit & 1u) << (31 - bit);
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(simt::to_word(value)); }
inline int __float_as_int(float value) { return static_cast<int>(simt::to_word(value)); }
inline float __uint_as_float(unsigned value) { return simt::from_word<float>(value); }
inline float __int_as_float(int value) { return simt::from_word<float>(static_cast<unsigned>(value)); }
inline long long __double_as_longlong(double value) { return static_cast<long long>(simt::to_word(value)); }
inline double __longlong_as_double(long long value) { return simt::from_word<double>(static_cast<uint64_t>(value)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
