// What is done with rows, on the kernels that this processor runs best (kernels/), all to the same bits.
#pragma once
#include <cstdint>
#include <cstring>

namespace ubep {

enum class Dtype : int { bf16, fp16, fp32 };
enum class Quantisation : int { none, fp8, int8 };

constexpr int kMaxTopk = 64;

inline int dtype_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// The instruction set in use.
const char* isa();

// stream: by stores that bypass the caches; call fence_streams before the flag that tells of them.
void copy_row(char* out, const char* from, int64_t nbytes, bool stream);
void fence_streams();

// Ask for the lines of a row to be written, many at once: those that another core has read since come one
// round trip each, and stores by themselves wait for them one by one.
inline void claim(char* row, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += 64) {
#if defined(__x86_64__)
        asm volatile("prefetchw %0" : : "m"(row[at]));  // compilers take it for rarer than it is
#else
        __builtin_prefetch(row + at, 1);
#endif
    }
}

// Sum of n rows, times their weights unless these are null, in the order of ubep.protocol.reduction.
void reduce_rows(Dtype dtype, char* out, const char* const* rows, const float* weights, int n, int hidden,
                 bool stream);

// As ubep.protocol.quantise.
void quantise(Quantisation kind, Dtype dtype, char* q, float* scales, const char* row, int hidden);
void dequantise(Quantisation kind, Dtype dtype, char* out, const char* q, const float* scales, int hidden);

}  // namespace ubep
