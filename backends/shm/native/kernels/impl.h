// The kernels, compiled once for each instruction set by scalar.cpp, avx2.cpp and avx512.cpp. Everything is
// internal to the including file and nothing inline is called from elsewhere, so that the linker never takes a
// function of a wider set for a narrower one. Products and sums are rounded separately: compiled with
// -ffp-contract=off, which CMakeLists.txt and flags.cmake pass.
//
// NaN: a NaN stays a NaN. Its bits, which differ even between the paths of torch, are: bf16 0xffff (torch's
// vector paths), fp16 sign and leading payload kept, fp32 as the processor propagates it, fp8 0x7f with the
// sign, int8 0. A group that holds a NaN has scale 1; one that holds an infinity has an infinite scale.
#pragma once
#include "table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ubep {
namespace {

constexpr int kGroup = 128;
constexpr uint32_t kInfinity = 0x7f800000;

uint32_t bits(float value) { return __builtin_bit_cast(uint32_t, value); }
float from_bits(uint32_t value) { return __builtin_bit_cast(float, value); }

float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000u} << 16, exponent = (half >> 10) & 31, mantissa = half & 1023;
    if (exponent == 0) return from_bits(sign | bits(static_cast<float>(mantissa) * 0x1p-24f));
    if (exponent == 31) return from_bits(sign | kInfinity | (mantissa ? 0x400000u : 0u) | mantissa << 13);
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t float_to_half(float value) {
    const uint32_t u = bits(value), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    uint32_t half;
    if (a > kInfinity) {
        half = 0x7e00 | ((a >> 13) & 1023);
    } else if (a >= 0x477ff000) {  // 65520 and above round to infinity
        half = 0x7c00;
    } else if (a < 0x38800000) {  // subnormal: the sum with 0.5 has the spacing of fp16 subnormals
        half = bits(from_bits(a) + 0.5f) - bits(0.5f);
    } else {
        half = (a + 0xfff + ((a >> 13) & 1) - (112u << 23)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
}

uint16_t float_to_bf16(float value) {
    const uint32_t u = bits(value);
    if ((u & 0x7fffffff) > kInfinity) return 0xffff;
    return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

struct Scalar {
    using T = float;
    static constexpr int width = 1, unroll = 16;
    static T all(float value) { return value; }
    static T add(T a, T b) { return a + b; }
    static T mul(T a, T b) { return a * b; }
    template <Dtype D>
    static T load(const char* from) {
        if constexpr (D == Dtype::fp32) {
            float value;
            __builtin_memcpy(&value, from, 4);
            return value;
        } else {
            uint16_t value;
            __builtin_memcpy(&value, from, 2);
            return D == Dtype::fp16 ? half_to_float(value) : from_bits(uint32_t{value} << 16);
        }
    }
    template <Dtype D, bool Stream>
    static void store(char* out, T value) {
        if constexpr (D == Dtype::fp32) {
            __builtin_memcpy(out, &value, 4);
        } else {
            const uint16_t narrow = D == Dtype::fp16 ? float_to_half(value) : float_to_bf16(value);
            __builtin_memcpy(out, &narrow, 2);
        }
    }
};

#if defined(__AVX512F__)

struct Vector {
    using T = __m512;
    static constexpr int width = 16, unroll = 4;
    static T all(float value) { return _mm512_set1_ps(value); }
    static T add(T a, T b) { return _mm512_add_ps(a, b); }
    static T mul(T a, T b) { return _mm512_mul_ps(a, b); }
    // bf16 in the upper halves.
    static __m512i rounded(T value) {
        const __m512i u = _mm512_castps_si512(value);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
        return _mm512_mask_set1_epi32(r, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), -1);
    }
    template <Dtype D>
    static T load(const char* from) {
        if constexpr (D == Dtype::fp32) {
            return _mm512_loadu_ps(from);
        } else {
            const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            if constexpr (D == Dtype::fp16) return _mm512_cvtph_ps(narrow);
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
        }
    }
    template <Dtype D, bool Stream>
    static void store(char* out, T value) {
        if constexpr (D == Dtype::fp32) {
            if constexpr (Stream) {
                _mm512_stream_ps(reinterpret_cast<float*>(out), value);
            } else {
                _mm512_storeu_ps(out, value);
            }
        } else {
            __m256i narrow;
            if constexpr (D == Dtype::fp16) {
                narrow = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            } else {
                narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(value), 16));
            }
            if constexpr (Stream) {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(out), narrow);
            } else {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), narrow);
            }
        }
    }
};

#elif defined(__AVX2__)

struct Vector {
    using T = __m256;
    static constexpr int width = 8, unroll = 8;
    static T all(float value) { return _mm256_set1_ps(value); }
    static T add(T a, T b) { return _mm256_add_ps(a, b); }
    static T mul(T a, T b) { return _mm256_mul_ps(a, b); }
    // bf16 in the upper halves.
    static __m256i rounded(T value) {
        const __m256i u = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
        return _mm256_or_si256(r, _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q)));
    }
    template <Dtype D>
    static T load(const char* from) {
        if constexpr (D == Dtype::fp32) {
            return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
        } else {
            const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            if constexpr (D == Dtype::fp16) return _mm256_cvtph_ps(narrow);
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
        }
    }
    template <Dtype D, bool Stream>
    static void store(char* out, T value) {
        if constexpr (D == Dtype::fp32) {
            if constexpr (Stream) {
                _mm256_stream_ps(reinterpret_cast<float*>(out), value);
            } else {
                _mm256_storeu_ps(reinterpret_cast<float*>(out), value);
            }
        } else {
            __m128i narrow;
            if constexpr (D == Dtype::fp16) {
                narrow = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            } else {
                const __m256i r = _mm256_srli_epi32(rounded(value), 16);
                narrow = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
            }
            if constexpr (Stream) {
                _mm_stream_si128(reinterpret_cast<__m128i*>(out), narrow);
            } else {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(out), narrow);
            }
        }
    }
};

#else
using Vector = Scalar;
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// A vector of bf16 as two of float32, the columns of even and those of odd number, in any compiler's vectors:
// loads and stores are whole and nothing is shuffled. For little-endian machines.
struct Pair {
    using Floats = float __attribute__((vector_size(kVectorBytes)));
    using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
    struct T {
        Floats even, odd;
    };
    static constexpr int width = kVectorBytes / 2, unroll = 4;
    static constexpr uint32_t high = 0xffff0000;
    static T all(float value) { return {value - Floats{}, value - Floats{}}; }
    static T add(const T& a, const T& b) { return {a.even + b.even, a.odd + b.odd}; }
    static T mul(const T& a, const T& b) { return {a.even * b.even, a.odd * b.odd}; }
    template <Dtype D>
    static T load(const char* from) {
        Words both;
        __builtin_memcpy(&both, from, sizeof both);
        return {reinterpret_cast<Floats>(both << 16), reinterpret_cast<Floats>(both & high)};
    }
    static Words rounded(const Floats& value) {  // bf16 in the upper halves
        const Words u = reinterpret_cast<Words>(value);
        return (u + 0x7fff + (u >> 16 & 1)) | reinterpret_cast<Words>(value != value);
    }
    template <Dtype D, bool Stream>
    static void store(char* out, const T& value) {
        const Words both = rounded(value.even) >> 16 | (rounded(value.odd) & high);
#if defined(__x86_64__)
        if constexpr (Stream) {
#if defined(__AVX512F__)
            return _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(both));
#elif defined(__AVX2__)
            return _mm256_stream_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<__m256i>(both));
#else
            return _mm_stream_si128(reinterpret_cast<__m128i*>(out), reinterpret_cast<__m128i>(both));
#endif
        }
#endif
        __builtin_memcpy(out, &both, sizeof both);
    }
};

template <Dtype D>
struct WideOf {
    using V = Vector;
};
template <>
struct WideOf<Dtype::bf16> {
    using V = Pair;
};

template <Dtype D>
constexpr int kBytes = D == Dtype::fp32 ? 4 : 2;

// ---- copies

[[maybe_unused]] int to_line(const char* out) { return static_cast<int>(-reinterpret_cast<uintptr_t>(out) & 63); }

void copy_streaming(char* out, const char* from, int64_t nbytes) {
#if defined(__x86_64__)
    int64_t i = to_line(out);
    if (i + 64 <= nbytes) {
        __builtin_memcpy(out, from, static_cast<size_t>(i));
        for (; i + 64 <= nbytes; i += 64) {
#if defined(__AVX512F__)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
            const auto* wide = reinterpret_cast<const __m256i*>(from + i);
            const __m256i a = _mm256_loadu_si256(wide), b = _mm256_loadu_si256(wide + 1);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), a);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i) + 1, b);
#else
            for (int j = 0; j < 64; j += 16) {
                const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + j));
                _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + j), a);
            }
#endif
        }
        out += i, from += i, nbytes -= i;
    }
#endif
    __builtin_memcpy(out, from, static_cast<size_t>(nbytes));
}

// ---- reduction

// Columns [c, end) in blocks of U vectors, as many whole blocks as fit; returns where it stopped.
template <class V, int U, Dtype D, bool Weighted, bool Stream>
int reduce_columns(char* out, const char* const* rows, const float* weights, int n, int c, int end) {
    constexpr int block = U * V::width;
    for (; c + block <= end; c += block) {
        typename V::T sum[U];
        for (int u = 0; u < U; u++) sum[u] = V::all(-0.0f);
        for (int j = 0; j < n; j++) {
            const char* from = rows[j] + int64_t{c} * kBytes<D>;
            [[maybe_unused]] const typename V::T weight = V::all(Weighted ? weights[j] : 1.0f);
            for (int u = 0; u < U; u++) {
                typename V::T term = V::template load<D>(from + u * V::width * kBytes<D>);
                if constexpr (Weighted) term = V::mul(term, weight);
                sum[u] = V::add(sum[u], term);
            }
        }
        for (int u = 0; u < U; u++) {
            V::template store<D, Stream>(out + (int64_t{c} + u * V::width) * kBytes<D>, sum[u]);
        }
    }
    return c;
}

template <Dtype D, bool Weighted>
void reduce(char* out, const char* const* rows, const float* weights, int n, int hidden, bool stream) {
    using Wide = typename WideOf<D>::V;
    int c = 0;
    if (stream && to_line(out) % kBytes<D> == 0) {
        const int head = to_line(out) / kBytes<D>;
        c = reduce_columns<Scalar, 1, D, Weighted, false>(out, rows, weights, n, 0, head < hidden ? head : hidden);
        c = reduce_columns<Wide, Wide::unroll, D, Weighted, true>(out, rows, weights, n, c, hidden);
    } else {
        c = reduce_columns<Wide, Wide::unroll, D, Weighted, false>(out, rows, weights, n, c, hidden);
    }
    c = reduce_columns<Wide, 1, D, Weighted, false>(out, rows, weights, n, c, hidden);
    c = reduce_columns<Vector, 1, D, Weighted, false>(out, rows, weights, n, c, hidden);
    reduce_columns<Scalar, 1, D, Weighted, false>(out, rows, weights, n, c, hidden);
}

template <Dtype D>
void reduce(char* out, const char* const* rows, const float* weights, int n, int hidden, bool stream) {
    if (n == 0) {
        __builtin_memset(out, 0, static_cast<size_t>(hidden) * kBytes<D>);
    } else if (weights) {
        reduce<D, true>(out, rows, weights, n, hidden, stream);
    } else {
        reduce<D, false>(out, rows, weights, n, hidden, stream);
    }
}

void reduce_any(Dtype dtype, char* out, const char* const* rows, const float* weights, int n, int hidden,
                bool stream) {
    if (dtype == Dtype::bf16) return reduce<Dtype::bf16>(out, rows, weights, n, hidden, stream);
    if (dtype == Dtype::fp16) return reduce<Dtype::fp16>(out, rows, weights, n, hidden, stream);
    reduce<Dtype::fp32>(out, rows, weights, n, hidden, stream);
}

// ---- quantised rows: blocks of up to kGroup columns, in float32

template <Dtype D>
void load_block(float* x, const char* row, int m) {
    int c = 0;
    for (; c + Vector::width <= m; c += Vector::width) {
        Vector::store<Dtype::fp32, false>(reinterpret_cast<char*>(x + c), Vector::load<D>(row + c * kBytes<D>));
    }
    for (; c < m; c++) x[c] = Scalar::load<D>(row + c * kBytes<D>);
}

template <Dtype D>
void store_block(char* out, const float* x, int m) {
    int c = 0;
    for (; c + Vector::width <= m; c += Vector::width) {
        const auto value = Vector::load<Dtype::fp32>(reinterpret_cast<const char*>(x + c));
        Vector::store<D, false>(out + c * kBytes<D>, value);
    }
    for (; c < m; c++) Scalar::store<D, false>(out + c * kBytes<D>, x[c]);
}

// The bits of the largest magnitude: ordered as integers, any NaN is the largest.
int32_t largest(const float* x, int m, int32_t seen) {
    for (int c = 0; c < m; c++) {
        const auto a = static_cast<int32_t>(bits(x[c]) & 0x7fffffff);
        seen = a > seen ? a : seen;
    }
    return seen;
}

float scale_of(int32_t amax, float limit) {
    const bool positive = amax > 0 && amax <= static_cast<int32_t>(kInfinity);
    return positive ? from_bits(static_cast<uint32_t>(amax)) / limit : 1.0f;
}

void to_fp8(char* q, const float* x, float scale, int m) {
    for (int c = 0; c < m; c++) {
        const uint32_t u = bits(x[c] / scale), a = u & 0x7fffffff;
        const uint32_t clamped = a < 0x43e00000 ? a : 0x43e00000;  // 448
        const uint32_t small = bits(from_bits(clamped) + 0x1p14f) - bits(0x1p14f);  // spacing 2^-9
        const uint32_t normal = (clamped + 0x7ffff + ((clamped >> 20) & 1) - (120u << 23)) >> 20;
        const uint32_t finite = clamped < 0x3c800000 ? small : normal;  // 2^-6
        q[c] = static_cast<char>((a > kInfinity ? 0x7f : finite) | (u >> 24 & 0x80));
    }
}

void to_int8(char* q, const float* x, float scale, int m) {
    for (int c = 0; c < m; c++) {
        const float value = x[c] / scale;
        const uint32_t u = bits(value), a = u & 0x7fffffff;
        const uint32_t clamped = a < 0x42fe0000 ? a : 0x42fe0000;  // 127
        const float rounded = from_bits(clamped | (u & 0x80000000)) + 0x1.8p23f;
        q[c] = static_cast<char>(a > kInfinity ? 0u : bits(rounded));  // the low byte of the mantissa
    }
}

template <Dtype D>
void quantise_row(Quantisation kind, char* q, float* scales, const char* row, int hidden) {
    float x[kGroup];
    float scale = 1.0f;
    if (kind == Quantisation::int8) {
        int32_t amax = 0;
        for (int c = 0; c < hidden; c += kGroup) {
            const int m = hidden - c < kGroup ? hidden - c : kGroup;
            load_block<D>(x, row + int64_t{c} * kBytes<D>, m);
            amax = largest(x, m, amax);
        }
        scale = scale_of(amax, 127.0f);
        __builtin_memcpy(scales, &scale, sizeof scale);
    }
    for (int c = 0; c < hidden; c += kGroup) {
        const int m = hidden - c < kGroup ? hidden - c : kGroup;
        load_block<D>(x, row + int64_t{c} * kBytes<D>, m);
        if (kind == Quantisation::int8) {
            to_int8(q + c, x, scale, m);
        } else {
            scale = scale_of(largest(x, m, 0), 448.0f);
            __builtin_memcpy(reinterpret_cast<char*>(scales) + c / kGroup * sizeof scale, &scale, sizeof scale);
            to_fp8(q + c, x, scale, m);
        }
    }
}

void quantise_any(Quantisation kind, Dtype dtype, char* q, float* scales, const char* row, int hidden) {
    if (dtype == Dtype::bf16) return quantise_row<Dtype::bf16>(kind, q, scales, row, hidden);
    if (dtype == Dtype::fp16) return quantise_row<Dtype::fp16>(kind, q, scales, row, hidden);
    quantise_row<Dtype::fp32>(kind, q, scales, row, hidden);
}

void from_fp8(float* x, const char* q, float scale, int m) {
    for (int c = 0; c < m; c++) {
        const uint32_t u = static_cast<unsigned char>(q[c]), a = u & 0x7f;
        const uint32_t small = bits(static_cast<float>(static_cast<int32_t>(a)) * 0x1p-9f);
        const uint32_t finite = a < 8 ? small : (a << 20) + (120u << 23);
        x[c] = from_bits((a == 0x7f ? 0x7ff00000 : finite) | (u & 0x80) << 24) * scale;
    }
}

void from_int8(float* x, const char* q, float scale, int m) {
    for (int c = 0; c < m; c++) x[c] = static_cast<float>(static_cast<signed char>(q[c])) * scale;
}

template <Dtype D>
void dequantise_row(Quantisation kind, char* out, const char* q, const float* scales, int hidden) {
    float x[kGroup];
    for (int c = 0; c < hidden; c += kGroup) {
        const int m = hidden - c < kGroup ? hidden - c : kGroup;
        const int group = kind == Quantisation::fp8 ? c / kGroup : 0;
        float scale;
        __builtin_memcpy(&scale, reinterpret_cast<const char*>(scales) + group * sizeof scale, sizeof scale);
        if (kind == Quantisation::fp8) {
            from_fp8(x, q + c, scale, m);
        } else {
            from_int8(x, q + c, scale, m);
        }
        store_block<D>(out + int64_t{c} * kBytes<D>, x, m);
    }
}

void dequantise_any(Quantisation kind, Dtype dtype, char* out, const char* q, const float* scales, int hidden) {
    if (dtype == Dtype::bf16) return dequantise_row<Dtype::bf16>(kind, out, q, scales, hidden);
    if (dtype == Dtype::fp16) return dequantise_row<Dtype::fp16>(kind, out, q, scales, hidden);
    dequantise_row<Dtype::fp32>(kind, out, q, scales, hidden);
}

}  // namespace

extern const Kernels UBEP_KERNELS;
const Kernels UBEP_KERNELS{UBEP_ISA, copy_streaming, reduce_any, quantise_any, dequantise_any};

}  // namespace ubep
