#include <cstdlib>
#include <stdexcept>
#include <string>

#include "table.h"

namespace ubep {
namespace {

// Widest first.
const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#endif
    &kScalar};

bool runs(const Kernels* set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (set == &kAvx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    if (set == &kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
    return set == &kScalar;
}

const Kernels& choose() {
    if (const char* wanted = std::getenv("UBEP_SHM_ISA"); wanted && *wanted) {
        if (const Kernels* set = find_kernels(wanted)) return *set;
        throw std::runtime_error("UBEP_SHM_ISA=" + std::string(wanted) +
                                 ": unknown, or not on this processor (scalar, avx2, avx512)");
    }
    for (const Kernels* set : kAll) {
        if (runs(set)) return *set;
    }
    return kScalar;
}

}  // namespace

const Kernels* find_kernels(const char* name) {
    for (const Kernels* set : kAll) {
        if (std::strcmp(set->name, name) == 0 && runs(set)) return set;
    }
    return nullptr;
}

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

const char* isa() { return kernels().name; }

void copy_row(char* out, const char* from, int64_t nbytes, bool stream) {
    if (stream) return kernels().copy_streaming(out, from, nbytes);
    std::memcpy(out, from, static_cast<size_t>(nbytes));
}

void fence_streams() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

void reduce_rows(Dtype dtype, char* out, const char* const* rows, const float* weights, int n, int hidden,
                 bool stream) {
    kernels().reduce_rows(dtype, out, rows, weights, n, hidden, stream);
}

void quantise(Quantisation kind, Dtype dtype, char* q, float* scales, const char* row, int hidden) {
    kernels().quantise(kind, dtype, q, scales, row, hidden);
}

void dequantise(Quantisation kind, Dtype dtype, char* out, const char* q, const float* scales, int hidden) {
    kernels().dequantise(kind, dtype, out, q, scales, hidden);
}

}  // namespace ubep
