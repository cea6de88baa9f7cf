// The primitives of generated kernels for the executor: they replace row loads and inline PTX.

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
__device__ __forceinline__ uint32_t float_to_fp16(float value) { return simt::float_to_half(value); }
__device__ __forceinline__ uint32_t float_to_bf16(float value) { return simt::float_to_bf16(value); }

// Converts two numbers of an 8-bit format, by the definition of a floating-point number.
template <class T>
__device__ __forceinline__ uint32_t to_halves(uint16_t pair) {
    const auto half = [](uint32_t byte) {
        const uint32_t code = byte & 0x7fu, exponent = code >> T::MANTISSA, fraction = code & ((1u << T::MANTISSA) - 1u);
        const bool has_infinity = T::INFINITE > T::LARGEST;
        double size = std::ldexp(fraction + (exponent ? 1u << T::MANTISSA : 0u), int(exponent ? exponent : 1u) - T::BIAS - T::MANTISSA);
        if (code > T::LARGEST) size = has_infinity && code == T::INFINITE ? INFINITY : NAN;
        return float_to_fp16(std::copysign(static_cast<float>(size), byte & 0x80u ? -1.0f : 1.0f));
    };
    return half(pair & 0xffu) | half(pair >> 8) << 16;
}

__device__ __forceinline__ uint32_t unhoisted(uint32_t value) { return value; }
