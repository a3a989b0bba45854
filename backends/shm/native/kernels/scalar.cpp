#define UBEP_KERNELS kScalar
#define UBEP_ISA "scalar"
#include "impl.h"
