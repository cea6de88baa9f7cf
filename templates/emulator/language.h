// CUDA's keywords. NVIDIA's own headers use them too, so this header comes before those.
#pragma once

#include "runtime.h"

#define SIMT_JOIN2(a, b) a##b
#define SIMT_JOIN(a, b) SIMT_JOIN2(a, b)
#define SIMT_SECTION(name) __attribute__((used, section(name)))

#define __device__
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define SIMT_SHARED(number)                                                                            \
    static SIMT_SECTION("simt_shared") __attribute__((aligned(1)))                                     \
    simt::SharedEnd SIMT_JOIN(simt_end_, number) = {SIMT_END_MAGIC};                                   \
    static SIMT_SECTION("simt_shared")                                                                 \
        simt::SharedBegin SIMT_JOIN(simt_begin_, number) = {SIMT_BEGIN_MAGIC, __func__, __LINE__, {}}; \
    static SIMT_SECTION("simt_shared")
#define __shared__ SIMT_SHARED(__COUNTER__)
