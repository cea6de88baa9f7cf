// Kernels whose memory instructions can be counted by hand. All but the last ones run as one warp.

#define LANE (threadIdx.x % 32)

extern "C" __global__ void neighbours(const float* in, float* out) { out[LANE] = in[LANE]; }

extern "C" __global__ void strided(const float* in, float* out) { out[LANE] = in[8 * LANE]; }

extern "C" __global__ void shifted(const float* in, float* out) { out[LANE] = in[LANE + 1]; }

extern "C" __global__ void same_for_all(const float* in, float* out) { out[LANE] = in[5]; }

extern "C" __global__ void sixteen_bytes(const float4* in, float4* out) { out[LANE] = in[LANE]; }

extern "C" __global__ void half_a_warp(const float* in, float* out) {
    if (LANE < 16) out[LANE] = in[LANE];
}

// Lane l makes l + 1 turns.
extern "C" __global__ void triangle(const float* in, float* out) {
    float sum = 0.0f;
    for (unsigned turn = 0; turn <= LANE; ++turn) sum += in[turn];
    out[LANE] = sum;
}

// In every turn half of the lanes have nothing to load: they must not run ahead and join the others' next turn.
extern "C" __global__ void every_other_turn(const float* in, float* out) {
    float sum = 0.0f;
    for (unsigned turn = 0; turn < 4; ++turn)
        if ((LANE + turn) % 2 == 0) sum += in[32 * turn + LANE];
    out[LANE] = sum;
}

// Inner loops of 1 and 3 turns, in turns: a lane that has done its one waits for those with three.
extern "C" __global__ void nested(const float* in, float* out) {
    float sum = 0.0f;
    for (unsigned outer = 0; outer < 2; ++outer)
        for (unsigned inner = 0; inner < ((LANE + outer) % 2 ? 3 : 1); ++inner) sum += in[LANE];
    out[LANE] = sum;
}

extern "C" __global__ void both_ways(const float* in, float* out) {
    float value;
    if (LANE % 2) value = in[LANE]; else value = in[LANE + 64];
    out[LANE] = value;
}

extern "C" __global__ void no_conflict(const float* in, float* out) {
    __shared__ float s[32 * 33];
    s[33 * LANE] = 1.0f;
    out[LANE] = s[33 * LANE];
}

extern "C" __global__ void all_in_one_bank(const float* in, float* out) {
    __shared__ float s[32 * 32];
    s[32 * LANE] = 1.0f;
    out[LANE] = s[32 * LANE];
}

extern "C" __global__ void two_in_a_bank(const float* in, float* out) {
    __shared__ float s[64];
    s[2 * LANE] = 1.0f;
    out[LANE] = s[2 * LANE];
}

// A broadcast is no conflict, and 8 bytes per lane need two wavefronts in any case.
extern "C" __global__ void broadcast(const float* in, float* out) {
    __shared__ double s[32];
    s[LANE] = 1.0;
    __syncwarp();
    out[LANE] = static_cast<float>(s[3]);
}

extern "C" __global__ void barriers_and_atomics(const float* in, float* out) {
    __syncthreads();
    if (threadIdx.x < 40) atomicAdd(out, in[0]);
    __syncthreads();
    __syncwarp();
}
