// The code books in global memory, in the form of their decoders: each file that includes this has
// its own, of which the compiler keeps what the file uses.
#pragma once

#include "common/code_tables.h"
#include "cuda/segment_dot.cuh"

namespace strata::books {

static __device__ const auto kIq2Xxs = kIq2XxsGrid;
static __device__ const auto kIq2Xs = kIq2XsGrid;
static __device__ const auto kIq2S = kIq2SGrid;
static __device__ const auto kIq3Xxs = kIq3XxsGrid;
static __device__ const auto kIq1 = kIq1Grid;

// IQ3_S: the numbers of the levels, l of 2 l + 1.
inline constexpr int8_t kNumbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static __device__ const auto kIq3S = SpreadGrid<uint32_t>(kIq3SPacked, kNumbers, 1, 0);

// The words of a type's code book.
__device__ __forceinline__ const uint32_t* Words(GgmlType type) {
  switch (type) {
    case GgmlType::kIQ2_XXS:
      return reinterpret_cast<const uint32_t*>(kIq2Xxs.entries);
    case GgmlType::kIQ2_XS:
      return reinterpret_cast<const uint32_t*>(kIq2Xs.entries);
    case GgmlType::kIQ2_S:
      return reinterpret_cast<const uint32_t*>(kIq2S.entries);
    case GgmlType::kIQ3_XXS:
      return kIq3Xxs.entries;
    case GgmlType::kIQ3_S:
      return kIq3S.entries;
    case GgmlType::kIQ1_S:
    case GgmlType::kIQ1_M:
      return reinterpret_cast<const uint32_t*>(kIq1.entries);
    default:
      return nullptr;
  }
}

}  // namespace strata::books
