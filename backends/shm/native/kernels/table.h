// One set of kernels per instruction set, all giving the same bits; rows.cpp chooses among them at run time.
#pragma once
#include "../rows.h"

namespace ubep {

struct Kernels {
    const char* name;
    void (*copy_streaming)(char* out, const char* from, int64_t nbytes);
    void (*reduce_rows)(Dtype, char* out, const char* const* rows, const float* weights, int n, int hidden,
                        bool stream);
    void (*quantise)(Quantisation, Dtype, char* q, float* scales, const char* row, int hidden);
    void (*dequantise)(Quantisation, Dtype, char* out, const char* q, const float* scales, int hidden);
};

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif

// The set of that name, or null where this processor cannot run it.
const Kernels* find_kernels(const char* name);

// The set in use: the widest, or the one named by UBEP_SHM_ISA. Throws where that one cannot be had.
const Kernels& kernels();

}  // namespace ubep
