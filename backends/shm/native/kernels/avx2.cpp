#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "flags.cmake gives this file its flags"
#endif
#define UBEP_KERNELS kAvx2
#define UBEP_ISA "avx2"
#include "impl.h"
#endif
