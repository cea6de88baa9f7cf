// The primitives of generated kernels, as the executor gives them: what stands in for row loads and inline PTX.

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
__device__ __forceinline__ void load_own(Vector<BYTES>& row, const char* address) {
    row = {};
    simt::load(row.word, address, BYTES, true);
}

template <class T>
__device__ __forceinline__ T read_only(const T* address) {
    return simt::read(address);
}

template <class T>
__device__ __forceinline__ T& dynamic_shared() {
    return *static_cast<T*>(simt::dynamic_shared());
}

__device__ __forceinline__ float half_to_float(uint16_t half) { return simt::half_to_float(half); }
__device__ __forceinline__ uint32_t float_to_half(float value) { return simt::float_to_half(value); }
__device__ __forceinline__ uint32_t float_to_bf16(float value) { return simt::float_to_bf16(value); }
__device__ __forceinline__ uint32_t fp8_to_halves(uint16_t pair) {
    const auto half = [](int bits) { return float_to_half(simt::fp8_to_float(static_cast<uint8_t>(bits))); };
    return half(pair) | half(pair >> 8) << 16;
}

__device__ __forceinline__ uint32_t unhoisted(uint32_t value) { return value; }
