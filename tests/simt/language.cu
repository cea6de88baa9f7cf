// Features of the language that device code may use, one kernel each; test_language.py has the expected results.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

// ==== primitives
template <class T>
__device__ __forceinline__ T& dynamic_shared() {
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
    return *reinterpret_cast<T*>(dynamic_shared_bytes);
}
// ==== end of primitives

extern "C" __global__ void indices(int* out) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    int* mine = out + 6 * (block * threads + thread);
    mine[0] = blockIdx.x, mine[1] = blockIdx.y, mine[2] = blockIdx.z;
    mine[3] = threadIdx.x, mine[4] = threadIdx.y, mine[5] = threadIdx.z;
}

// One warp; 16 results per lane.
extern "C" __global__ void warps(int* out) {
    const int lane = threadIdx.x;
    const unsigned all = 0xffffffffu;
    int* mine = out + 16 * lane;
    mine[0] = __shfl_sync(all, lane * 10, lane + 3);
    mine[1] = __shfl_sync(all, lane * 10, 1, 8);
    mine[2] = __shfl_up_sync(all, lane, 2);
    mine[3] = __shfl_up_sync(all, lane, 1, 4);
    mine[4] = __shfl_down_sync(all, lane, 5);
    mine[5] = __shfl_xor_sync(all, lane, 7);
    mine[6] = static_cast<int>(__ballot_sync(all, lane % 3 == 0));
    mine[7] = __any_sync(all, lane == 40) * 2 + __any_sync(all, lane == 4);
    mine[8] = __all_sync(all, lane < 32) * 2 + __all_sync(all, lane < 31);
    mine[9] = static_cast<int>(__match_any_sync(all, lane % 5));
    mine[10] = __reduce_add_sync(all, lane);
    mine[11] = __reduce_min_sync(all, lane - 5);
    mine[12] = __reduce_max_sync(all, lane - 5);
    mine[13] = static_cast<int>(__reduce_max_sync(all, static_cast<unsigned>(lane - 5)));
    mine[14] = static_cast<int>(__reduce_xor_sync(all, static_cast<unsigned>(lane * 3)));
    // Half of the warp reads the mask of active lanes.
    mine[15] = lane < 16 ? static_cast<int>(__activemask()) : static_cast<int>(__ballot_sync(0xffff0000u, lane % 2));
}

// A shuffle of 8 bytes, of a part of the warp, between double and long long.
extern "C" __global__ void wide_shuffles(double* out, long long* numbers) {
    const unsigned lane = threadIdx.x, mask = lane < 8 ? 0xffu : 0xffffff00u;
    out[lane] = __shfl_xor_sync(mask, lane + 0.5, 1);
    numbers[lane] = __shfl_sync(mask, (1ll << 40) + lane, lane < 8 ? 0 : 9);
}

extern "C" __global__ void votes(int* out) {
    const int thread = threadIdx.x;
    out[4 * thread] = __syncthreads_or(thread == 70) + 2 * __syncthreads_or(thread == 700);
    out[4 * thread + 1] = __syncthreads_and(thread >= 0) + 2 * __syncthreads_and(thread > 0);
    out[4 * thread + 2] = __syncthreads_count(thread % 3 == 0);
    out[4 * thread + 3] = static_cast<int>(warpSize);
}

// Every thread of the grid on the same few numbers.
extern "C" __global__ void atomics(int* ints, unsigned* words, unsigned long long* longs, float* floats, double* doubles) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(ints, i), atomicSub(ints + 1, 1), atomicMin(ints + 2, -i), atomicMax(ints + 3, i);
    atomicAnd(words, ~(1u << i % 32)), atomicOr(words + 1, 1u << i % 32), atomicXor(words + 2, 1u << i % 7);
    atomicInc(words + 3, 9u), atomicDec(words + 4, 9u), atomicAdd(words + 5, 1u);
    atomicAdd(longs, 1ull << 40), atomicMax(longs + 1, static_cast<unsigned long long>(i) << 33);
    if (atomicCAS(longs + 2, 0ull, 1ull) == 0ull) atomicExch(longs + 3, 77ull);
    atomicAdd(floats, 0.5f), atomicAdd(doubles, 0.25);
}

// Threads of a block take turns by a lock in shared memory.
extern "C" __global__ void spin_lock(int* out) {
    __shared__ int lock, sum;
    if (threadIdx.x == 0) lock = 0, sum = 0;
    __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) {}
    volatile int* shared_sum = &sum;
    *shared_sum = *shared_sum + 1;
    atomicExch(&lock, 0);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" __global__ void bits(const unsigned* in, int* out) {
    const unsigned x = in[threadIdx.x];
    int* mine = out + 10 * threadIdx.x;
    mine[0] = __popc(x), mine[1] = __ffs(static_cast<int>(x)), mine[2] = __clz(static_cast<int>(x));
    mine[3] = static_cast<int>(__brev(x));
    mine[4] = __popcll(x | 1ull << 40), mine[5] = __ffsll(static_cast<long long>(x) << 8), mine[6] = __clzll(x);
    mine[7] = static_cast<int>(__umulhi(x, 0x9e3779b9u));
    mine[8] = __float_as_int(__uint_as_float(x >> 2));
    mine[9] = static_cast<int>(__funnelshift_l(x, ~x, 5));
}

// Numbers by NVIDIA's own headers, which the host compiles as they are.
extern "C" __global__ void conversions(const float* in, float* halves, float* bf16s, float* fp8s) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    halves[i] = __half2float(__float2half_rn(in[i]));
    bf16s[i] = __bfloat162float(__float2bfloat16_rn(in[i]));
    fp8s[i] = static_cast<float>(__nv_fp8_e4m3(in[i]));
}

extern "C" __global__ void vectors(const float4* in, float4* out, double2* doubles, const uint2* words, uint4* packed) {
    const int i = threadIdx.x;
    float4 v = __ldg(in + i);
    v.x += 1.0f;
    __stcs(out + i, v);
    doubles[i] = make_double2(v.y, v.z);
    const uint2 w = words[i];
    packed[i] = make_uint4(w.x, w.y, w.x ^ w.y, __ldcg(&words[i].x));
}

extern "C" __global__ void reversed_by_dynamic_shared(const int* in, int* out) {
    int* s = &dynamic_shared<int>();
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

__device__ __forceinline__ float halved(float x) { return x / 2.0f; }
__constant__ const float SCALE[2] = {3.0f, 5.0f};

// Sums of rows by one warp each, the rows' lengths all different: loops that lanes leave one after the other.
extern "C" __global__ void __launch_bounds__(64, 2) ragged(const float* in, const int* offsets, float* out) {
    const int row = blockIdx.x * 2 + threadIdx.x / 32;
    float sum = 0.0f;
    for (int k = offsets[row] + threadIdx.x % 32; k < offsets[row + 1]; k += warpSize) sum += halved(in[k]) * SCALE[row % 2];
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) out[row] = sum;
}
