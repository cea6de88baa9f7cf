// CUDA's vector types. A copy from or to memory is one access of the whole vector, as on a GPU. Plain structures would
// be copied by one access per element, so that misaligned vectors would not be found.
#pragma once

#include "runtime.h"

// These make NVIDIA's headers for half, bf16 and fp8 use the types below instead of their own.
#define __VECTOR_TYPES_H__
#define __VECTOR_FUNCTIONS_H__
#define __VECTOR_FUNCTIONS_HPP__
#define __NV_SILENCE_DEPRECATION_BEGIN
#define __NV_SILENCE_DEPRECATION_END

#define SIMT_VECTOR_MEMBERS(name)                                                             \
    name(const name& other) { simt::load_vector(this, &other, sizeof(name), alignof(name)); } \
    name& operator=(const name& other) {                                                      \
        name value(other);                                                                    \
        simt::store_vector(this, &value, sizeof(name), alignof(name));                        \
        return *this;                                                                         \
    }

#define SIMT_VECTOR2(T, name, align)   \
    struct alignas(align) name {       \
        T x, y;                        \
        SIMT_VECTOR_MEMBERS(name)      \
        constexpr name() : x(), y() {} \
        name(T x, T y) : x(x), y(y) {} \
    };                                 \
    inline name make_##name(T x, T y) { return {x, y}; }

#define SIMT_VECTOR4(T, name, align)                         \
    struct alignas(align) name {                             \
        T x, y, z, w;                                        \
        SIMT_VECTOR_MEMBERS(name)                            \
        constexpr name() : x(), y(), z(), w() {}             \
        name(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {} \
    };                                                       \
    inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }

#define SIMT_VECTORS(T, name, align2, align4)          \
    struct name##1 {                                   \
        T x;                                           \
    };                                                 \
    SIMT_VECTOR2(T, name##2, align2)                   \
    struct name##3 {                                   \
        T x, y, z;                                     \
    };                                                 \
    SIMT_VECTOR4(T, name##4, align4)                   \
    inline name##1 make_##name##1(T x) { return {x}; } \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }

SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned int, uint, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
SIMT_VECTOR4(long long, longlong4_32a, 32)
SIMT_VECTOR4(unsigned long long, ulonglong4_32a, 32)
SIMT_VECTOR4(double, double4_16a, 16)
SIMT_VECTOR4(double, double4_32a, 32)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
