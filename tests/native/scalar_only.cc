// Stands for the kernels of the wider instruction sets where a test is about threads and memory,
// not about products: only the scalar set is built, in seconds, and runs wherever the test does.

#include "common/panel.h"

namespace strata {

const Kernels& Avx2Kernels() { return ScalarKernels(); }
const Kernels& Avx512Kernels() { return ScalarKernels(); }

}  // namespace strata
