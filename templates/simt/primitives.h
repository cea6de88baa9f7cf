// The primitives of generated kernels, as the executor gives them: what stands in for vector access and inline PTX.

struct fp16_t {
    uint16_t bits;
};
struct bf16_t {
    uint16_t bits;
};
struct fp8_t {
    uint8_t bits;
};

template <int BYTES>
struct Vector {
    uint32_t word[(BYTES + 3) / 4];
};

template <int BYTES>
__device__ __forceinline__ void load_row(Vector<BYTES>& row, const char* address, bool present) {
    row = {};
    simt::load(row.word, address, BYTES, present);
}

template <int BYTES>
__device__ __forceinline__ void store(void* address, const uint32_t* word) {
    simt::store(address, word, BYTES);
}

template <class T>
__device__ __forceinline__ T read_only(const T* address) {
    return simt::read(address);
}

template <class T>
__device__ __forceinline__ T& dynamic_shared() {
    return *static_cast<T*>(simt::dynamic_shared());
}

template <int BYTES>
__device__ __forceinline__ void unpack(float, const Vector<BYTES>& row, float (&out)[BYTES / 4]) {
    for (int e = 0; e < BYTES / 4; ++e) out[e] = __uint_as_float(row.word[e]);
}
template <int BYTES>
__device__ __forceinline__ void unpack(fp16_t, const Vector<BYTES>& row, float (&out)[BYTES / 2]) {
    for (int e = 0; e < BYTES / 2; ++e)
        out[e] = simt::half_to_float(static_cast<uint16_t>(row.word[e / 2] >> (16 * (e % 2))));
}
template <int BYTES>
__device__ __forceinline__ void unpack(bf16_t, const Vector<BYTES>& row, float (&out)[BYTES / 2]) {
    for (int e = 0; e < BYTES / 2; ++e) out[e] = __uint_as_float(row.word[e / 2] >> (16 * (e % 2)) << 16);
}
template <int BYTES>
__device__ __forceinline__ void unpack(fp8_t, const Vector<BYTES>& row, float (&out)[BYTES]) {
    for (int e = 0; e < BYTES; ++e) out[e] = simt::fp8_to_float(static_cast<uint8_t>(row.word[e / 4] >> (8 * (e % 4))));
}

template <int COUNT>
__device__ __forceinline__ void pack(float, const float (&in)[COUNT], uint32_t (&word)[COUNT]) {
    for (int e = 0; e < COUNT; ++e) word[e] = __float_as_uint(in[e]);
}
template <int COUNT>
__device__ __forceinline__ void pack(fp16_t, const float (&in)[COUNT], uint32_t (&word)[(COUNT + 1) / 2]) {
    for (int e = 0; e < COUNT; e += 2) word[e / 2] = 0;
    for (int e = 0; e < COUNT; ++e) word[e / 2] |= static_cast<uint32_t>(simt::float_to_half(in[e])) << (16 * (e % 2));
}
template <int COUNT>
__device__ __forceinline__ void pack(bf16_t, const float (&in)[COUNT], uint32_t (&word)[(COUNT + 1) / 2]) {
    for (int e = 0; e < COUNT; e += 2) word[e / 2] = 0;
    for (int e = 0; e < COUNT; ++e) word[e / 2] |= static_cast<uint32_t>(simt::float_to_bf16(in[e])) << (16 * (e % 2));
}

__device__ __forceinline__ uint32_t unhoisted(uint32_t value) { return value; }
template <int BYTES>
__device__ __forceinline__ Vector<BYTES> unhoisted(Vector<BYTES> value) {
    return value;
}

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
