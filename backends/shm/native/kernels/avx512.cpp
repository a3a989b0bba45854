#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "flags.cmake gives this file its flags"
#endif
#define UBEP_KERNELS kAvx512
#define UBEP_ISA "avx512"
#include "impl.h"
#endif
