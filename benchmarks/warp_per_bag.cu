// The mapping that embforge's kernels are compared with: one warp per bag, and as many vectors per lane as the widest
// table of the collection needs. It makes the loads of a lookup and folds what it loads into one word per bag.

struct Feature {
    const char* rows;
    int64_t row_bytes, stride, vector;  // in bytes: the size of a row, the distance of rows, the size of a load
};

template <int BYTES>
__device__ __forceinline__ uint32_t fold_row(const Feature& f, int64_t row, int64_t lane_vector) {
    Vector<BYTES> part;
    load_row(part, f.rows + row * f.stride + lane_vector * BYTES, lane_vector * BYTES < f.row_bytes);
    return part.word[0];
}

extern "C" __global__ void warp_per_bag(
    const Feature* features, const int64_t* values, const int64_t* offsets, uint32_t* out, int64_t batch, int64_t bags,
    int64_t vectors_per_lane
) {
    const int lane = threadIdx.x % 32;
    const int64_t bag = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (bag >= bags) return;
    const Feature f = features[bag / batch];
    const int64_t begin = read_only(offsets + bag), end = read_only(offsets + bag + 1);
    uint32_t folded = 0;
    for (int64_t first = begin; first < end; first += 32) {
        const int64_t id = first + lane < end ? read_only(values + first + lane) : 0;
        const int count = static_cast<int>(end - first < 32 ? end - first : 32);
        for (int k = 0; k < count; ++k) {
            const int64_t row = __shfl_sync(0xffffffffu, id, k);
            for (int64_t v = 0; v < vectors_per_lane; ++v) {
                const int64_t vector = v * 32 + lane;
                switch (f.vector) {
                case 16: folded ^= fold_row<16>(f, row, vector); break;
                case 8: folded ^= fold_row<8>(f, row, vector); break;
                case 4: folded ^= fold_row<4>(f, row, vector); break;
                case 2: folded ^= fold_row<2>(f, row, vector); break;
                default: folded ^= fold_row<1>(f, row, vector); break;
                }
            }
        }
    }
    folded = __reduce_xor_sync(0xffffffffu, folded);
    if (lane == 0) out[bag] = folded;
}
