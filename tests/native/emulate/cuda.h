// What CUDA has beyond C++, for building .cu files with the host's compiler (STRATA_EMULATE).
//
// Only what the project's kernels use; a name that is missing fails to compile rather than meaning
// something else. Not emulated, and so for a GPU to show: races that the chosen order hides
// (SetOrder), blocks that wait for later blocks, the cost of anything, and the last bit of
// approximate functions (__expf, rsqrtf).
#pragma once

// Headers whose text contains words that are macros below.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "emulate/run.h"
#include "emulate/sync.h"
#include "emulate/vectors.h"

// NOLINTBEGIN: CUDA's names
#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))

// Statics, since blocks run one after another, in a section of their own, so that they can be made
// NaN when a block starts. The compiler wants variables of inline functions in a section of another
// kind than the rest, so each variable gets its own name for it, whose end is a comment to the
// assembler. Variables of templates GCC leaves where they are, without a word: those keep their
// values from block to block.
#define STRATA_EMULATE_TEXT_(x) #x
#define STRATA_EMULATE_TEXT(x) STRATA_EMULATE_TEXT_(x)
#if defined(__x86_64__)
#define STRATA_EMULATE_COMMENT "#"
#else
#define STRATA_EMULATE_COMMENT "//"
#endif
#define __shared__               \
  static __attribute__((section( \
      "strata_shared,\"aw\",@progbits " STRATA_EMULATE_COMMENT STRATA_EMULATE_TEXT(__COUNTER__))))

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;
// NOLINTEND

#include "emulate/intrinsics.h"
#include "emulate/memory.h"
#include "emulate/runtime.h"
