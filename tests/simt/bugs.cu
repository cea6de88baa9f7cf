// Small kernels, each with one bug at the line that says so; those whose name begins with `sound` have none.
// A block has 64 threads, a grid 2 blocks; `in` and `out` have n = 128 floats.

// ==== primitives
template <class T>
__device__ __forceinline__ T& dynamic_shared() {
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
    return *reinterpret_cast<T*>(dynamic_shared_bytes);
}
// ==== end of primitives

#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)

// ---- barriers and races in shared memory ----

extern "C" __global__ void sound_barrier(const float* in, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = in[INDEX];
    __syncthreads();
    out[INDEX] = s[63 - threadIdx.x];
}

extern "C" __global__ void missing_barrier(const float* in, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = in[INDEX];
    out[INDEX] = s[63 - threadIdx.x];  // BUG race
}

extern "C" __global__ void missing_second_barrier(const float* in, float* out, int n) {
    __shared__ float s[64];
    float sum = 0.0f;
    for (int turn = 0; turn < 3; ++turn) {
        s[threadIdx.x] = in[INDEX] + turn;  // BUG race
        __syncthreads();
        sum += s[63 - threadIdx.x];
    }
    out[INDEX] = sum;
}

extern "C" __global__ void missing_syncwarp(const float* in, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = in[INDEX];
    out[INDEX] = s[threadIdx.x ^ 1];  // BUG race
}

extern "C" __global__ void sound_syncwarp(const float* in, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = in[INDEX];
    __syncwarp();
    out[INDEX] = s[threadIdx.x ^ 1];
}

extern "C" __global__ void syncwarp_is_no_barrier(const float* in, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = in[INDEX];
    __syncwarp();
    out[INDEX] = s[63 - threadIdx.x];  // BUG race
}

// Groups of 8 lanes, each with its own mask: all read a number, then one of them changes it.
extern "C" __global__ void sound_subgroups(const float* in, float* out, int n) {
    __shared__ float s[8];
    const unsigned group = threadIdx.x / 8, mask = 0xffu << (threadIdx.x % 32 / 8 * 8);
    if (threadIdx.x % 8 == 0) s[group] = in[INDEX];
    __syncwarp(mask);
    float sum = 0.0f;
    for (int turn = 0; turn < 4; ++turn) {
        sum += s[group];
        __syncwarp(mask);
        if (threadIdx.x % 8 == turn) s[group] += 1.0f;
        __syncwarp(mask);
    }
    out[INDEX] = sum;
}

extern "C" __global__ void subgroup_reads_its_neighbour(const float* in, float* out, int n) {
    __shared__ float s[64];
    const unsigned mask = 0xffu << (threadIdx.x % 32 / 8 * 8);
    s[threadIdx.x] = in[INDEX];
    __syncwarp(mask);
    out[INDEX] = s[threadIdx.x ^ 8];  // BUG race
}

extern "C" __global__ void several_readers_then_a_write(const float* in, float* out, int n) {
    __shared__ float s[1];
    if (threadIdx.x == 0) s[0] = in[0];
    __syncthreads();
    out[INDEX] = s[0];
    if (threadIdx.x == 7) s[0] = 1.0f;  // BUG race
}

// ---- races in global memory ----

extern "C" __global__ void racing_store(const float* in, float* out, int n) {
    if (INDEX < n) out[INDEX / 2] = in[INDEX];  // BUG race
}

extern "C" __global__ void racing_blocks(const float* in, float* out, int n) {
    out[threadIdx.x] = in[INDEX];  // BUG race
}

extern "C" __global__ void sound_atomics(const float* in, float* out, int n) {
    if (INDEX < n) out[INDEX] = 0.0f;
    __syncthreads();
    atomicAdd(out + blockIdx.x * 64, in[INDEX]);
}

extern "C" __global__ void plain_read_of_an_atomic(const float* in, float* out, int n) {
    if (threadIdx.x % 2 == 0) atomicAdd(out + blockIdx.x, 1.0f);
    else out[INDEX] = in[INDEX] + out[blockIdx.x];  // BUG race
}

// ---- bounds ----

extern "C" __global__ void row_off_by_one(const float* in, float* out, int n) {
    out[INDEX] = in[INDEX + 1];  // BUG out-of-bounds
}

extern "C" __global__ void before_the_begin(const float* in, float* out, int n) {
    out[INDEX] = in[static_cast<int>(INDEX) - 1];  // BUG out-of-bounds
}

extern "C" __global__ void store_past_the_end(const float* in, float* out, int n) {
    out[INDEX + n - 64] = in[INDEX];  // BUG out-of-bounds
}

extern "C" __global__ void null_pointer(const float* in, float* out, int n) {
    const float* nothing = n > 0 ? nullptr : in;
    out[INDEX] = nothing[threadIdx.x];  // BUG out-of-bounds
}

extern "C" __global__ void shared_index(const float* in, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x + 1] = in[INDEX];  // BUG out-of-bounds
    __syncthreads();
    out[INDEX] = s[threadIdx.x];
}

extern "C" __global__ void shared_pointer(const float* in, float* out, int n) {
    __shared__ float s[33];
    float* p = s;
    for (int i = 0; i <= n / 4 + 1; ++i) if (threadIdx.x == 0) p[i] = in[i];  // BUG out-of-bounds
    __syncthreads();
    out[INDEX] = s[threadIdx.x % 32];
}

extern "C" __global__ void dynamic_shared_too_small(const float* in, float* out, int n) {
    float* s = &dynamic_shared<float>();
    s[threadIdx.x] = in[INDEX];  // BUG out-of-bounds
    __syncthreads();
    out[INDEX] = s[63 - threadIdx.x];
}

extern "C" __global__ void sound_dynamic_shared(const float* in, float* out, int n) {
    float* s = &dynamic_shared<float>();
    if (threadIdx.x < 32) s[threadIdx.x] = in[INDEX];
    __syncthreads();
    out[INDEX] = s[threadIdx.x % 32];
}

extern "C" __global__ void write_to_input(const float* in, float* out, int n) {
    const_cast<float*>(in)[INDEX] = 1.0f;  // BUG read-only
}

// ---- alignment ----

extern "C" __global__ void sound_float4(const float* in, float* out, int n) {
    if (INDEX < n / 4) reinterpret_cast<float4*>(out)[INDEX] = reinterpret_cast<const float4*>(in)[INDEX];
}

extern "C" __global__ void misaligned_float4(const float* in, float* out, int n) {
    const float4 v = *reinterpret_cast<const float4*>(in + INDEX % 8 + 1);  // BUG misaligned
    out[INDEX] = v.x;
}

extern "C" __global__ void misaligned_float2_store(const float* in, float* out, int n) {
    if (INDEX < 32) *reinterpret_cast<float2*>(out + 2 * INDEX + 1) = make_float2(in[INDEX], 0.0f);  // BUG misaligned
}

// ---- reads of memory that no thread has written ----

extern "C" __global__ void uninitialised_shared(const float* in, float* out, int n) {
    __shared__ float s[64];
    if (threadIdx.x < 63) s[threadIdx.x] = in[INDEX];
    __syncthreads();
    out[INDEX] = s[threadIdx.x];  // BUG uninitialised
}

extern "C" __global__ void uninitialised_output(const float* in, float* out, int n) {
    out[INDEX] += in[INDEX];  // BUG uninitialised
}

extern "C" __global__ void lost_tail(const float* in, float* out, int n) {
    if (INDEX < n - 1) out[INDEX] = in[INDEX];
}

// ---- barriers and warp operations that not all threads reach ----

extern "C" __global__ void divergent_barrier(const float* in, float* out, int n) {
    if (threadIdx.x < 32) {
        out[INDEX] = in[INDEX];
        __syncthreads();
    } else {
        __syncthreads();  // BUG divergent-barrier
    }
    out[INDEX] = in[INDEX];
}

extern "C" __global__ void sound_early_exit(const float* in, float* out, int n) {
    if (threadIdx.x >= 40) return;
    __syncthreads();
    out[INDEX] = in[INDEX];
}

extern "C" __global__ void shuffle_without_all_lanes(const float* in, float* out, int n) {
    float value = in[INDEX];
    if (threadIdx.x % 32 < 16) value = __shfl_down_sync(0xffffffffu, value, 1);  // BUG absent-lane
    out[INDEX] = value;
}

extern "C" __global__ void shuffle_outside_of_its_mask(const float* in, float* out, int n) {
    out[INDEX] = __shfl_xor_sync(0x0000ffffu, in[INDEX], 1);  // BUG absent-lane
}

extern "C" __global__ void shuffle_from_absent_lane(const float* in, float* out, int n) {
    if (threadIdx.x % 32 < 16) out[INDEX] = __shfl_sync(0x0000ffffu, in[INDEX], 20);  // BUG absent-lane
}

extern "C" __global__ void shuffle_against_barrier(const float* in, float* out, int n) {
    if (threadIdx.x == 5) __syncthreads();
    out[INDEX] = __shfl_xor_sync(0xffffffffu, in[INDEX], 1);  // BUG absent-lane
}

extern "C" __global__ void endless(const float* in, float* out, int n) {
    volatile float* flag = out;
    if (threadIdx.x == 0) {
        while (flag[0] != 1.0f) {}  // BUG endless
    }
}

extern "C" __global__ void trapped(const float* in, float* out, int n) {
    if (threadIdx.x == 3) __trap();  // BUG trap
}

extern "C" __global__ void sound_warp_sum(const float* in, float* out, int n) {
    float sum = in[INDEX];
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    out[INDEX] = sum;
}

// ---- copies, structures, other types ----

extern "C" __global__ void memcpy_past_the_end(const float* in, float* out, int n) {
    memcpy(out + INDEX, in + n - 4, sizeof(float) * (threadIdx.x == 7 ? 5 : 1));  // BUG out-of-bounds
}

extern "C" __global__ void memset_by_all(const float* in, float* out, int n) {
    memset(out, 0, sizeof(float) * n);  // BUG race
}

extern "C" __global__ void sound_memcpy(const float* in, float* out, int n) {
    __shared__ float s[64];
    memcpy(s + threadIdx.x, in + INDEX, sizeof(float));
    __syncthreads();
    if (threadIdx.x == 0) memcpy(out + blockIdx.x * 64, s, sizeof s);
}

struct alignas(16) Row {
    float v[4];
};

extern "C" __global__ void misaligned_structure(const float* in, float* out, int n) {
    const Row row = *reinterpret_cast<const Row*>(in + 1 + INDEX % 4);  // BUG misaligned
    out[INDEX] = row.v[0] + row.v[3];
}

struct Padded {
    char small;
    int number;
};

extern "C" __global__ void sound_padding(const float* in, float* out, int n) {
    __shared__ Padded s[64];
    s[threadIdx.x].small = 1;
    s[threadIdx.x].number = static_cast<int>(in[INDEX]);
    __syncthreads();
    const Padded copy = s[63 - threadIdx.x];
    out[INDEX] = static_cast<float>(copy.number + copy.small);
}

extern "C" __global__ void sound_exchange(const float* in, float* out, int n) {
    __shared__ int first;
    atomicExch(&first, 1);
    __syncthreads();
    out[INDEX] = in[INDEX] * first;
}

extern "C" __global__ void sound_bytes(const float* in, float* out, int n) {
    __shared__ char s[64];
    __shared__ __align__(16) float4 vectors[16];
    s[threadIdx.x] = static_cast<char>(threadIdx.x);
    if (threadIdx.x < 16) vectors[threadIdx.x] = reinterpret_cast<const float4*>(in)[threadIdx.x];
    __syncthreads();
    out[INDEX] = s[63 - threadIdx.x] + vectors[threadIdx.x / 4].y;
}

extern "C" __global__ void racing_bytes(const float* in, float* out, int n) {
    __shared__ char s[4];
    if (threadIdx.x < 2) s[threadIdx.x] = 1;
    if (threadIdx.x == 40) out[INDEX] = s[0];  // BUG race
}

extern "C" __global__ void atomic_after_a_plain_write(const float* in, float* out, int n) {
    if (INDEX == 0) out[0] = 0.0f;
    if (threadIdx.x == 0) atomicAdd(out, 1.0f);  // BUG race
}

extern "C" __global__ void far_out_of_shared(const float* in, float* out, int n) {
    __shared__ float s[64];
    float* p = s;
    p[threadIdx.x + 1100 * n] = in[INDEX];  // BUG out-of-bounds
}

__device__ float device_variable;

extern "C" __global__ void writes_a_device_variable(const float* in, float* out, int n) {
    device_variable = in[INDEX];  // BUG out-of-bounds
}

extern "C" __global__ void division_by_zero(const float* in, float* out, int n) {
    out[INDEX] = static_cast<float>(n / static_cast<int>(threadIdx.x));  // BUG bad-division
}

__device__ float deep(const float* in, int n) { return n < 0 ? in[0] : deep(in, n + 1) + in[1]; }

extern "C" __global__ void endless_recursion(const float* in, float* out, int n) {
    out[INDEX] = deep(in, n);
}

// ---- more ways to wait ----

extern "C" __global__ void endless_with_syncwarp(const float* in, float* out, int n) {
    volatile float* flag = out;
    while (flag[0] != 1.0f) __syncwarp();  // BUG endless
}

extern "C" __global__ void endless_with_barrier(const float* in, float* out, int n) {
    __shared__ int done;
    if (threadIdx.x == 0) done = 0;
    do { __syncthreads(); } while (done == 0);  // BUG endless
}

__device__ __forceinline__ void sync_all() { __syncthreads(); }  // BUG divergent-barrier

extern "C" __global__ void divergent_barrier_in_a_function(const float* in, float* out, int n) {
    if (threadIdx.x < 32) {
        out[INDEX] = in[INDEX];
        sync_all();
    } else {
        sync_all();
        out[INDEX] = in[INDEX];
    }
}

// Order is transitive: from all lanes of a group to its leader, then from leader to leader.
extern "C" __global__ void sound_leaders(const float* in, float* out, int n) {
    __shared__ float s[64];
    const unsigned lane = threadIdx.x % 32, mask = 0xffu << lane / 8 * 8;
    s[threadIdx.x] = in[INDEX];
    __syncwarp(mask);
    if (lane % 8 == 0) {
        __syncwarp(0x01010101u);
        out[INDEX] = s[threadIdx.x ^ 9];
    } else {
        out[INDEX] = 0.0f;
    }
}

// The guide wants the same mask of all lanes, not the same line, and none of those that have ended.
extern "C" __global__ void sound_syncwarp_in_branches(const float* in, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = in[INDEX];
    if (threadIdx.x % 32 < 16) {
        __syncwarp();
        out[INDEX] = s[threadIdx.x ^ 16];
    } else {
        __syncwarp();
        out[INDEX] = s[threadIdx.x ^ 16] + 1.0f;
    }
}

extern "C" __global__ void sound_votes_after_exits(const float* in, float* out, int n) {
    if (threadIdx.x % 32 >= 20) return;
    out[INDEX] = static_cast<float>(__popc(__ballot_sync(0xffffffffu, in[INDEX] >= 0.0f)));
}

extern "C" __global__ void shuffle_too_far(const float* in, float* out, int n) {
    out[INDEX] = __shfl_xor_sync(0xffffffffu, in[INDEX], -1);  // BUG bad-distance
}

// Lanes of a warp take turns by a lock.
extern "C" __global__ void sound_lock(const float* in, float* out, int n) {
    __shared__ int lock, sum;
    if (threadIdx.x == 0) lock = 0, sum = 0;
    __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) {}
    volatile int* shared_sum = &sum;
    *shared_sum = *shared_sum + 1;
    atomicExch(&lock, 0);
    __syncthreads();
    out[INDEX] = static_cast<float>(sum);
}
