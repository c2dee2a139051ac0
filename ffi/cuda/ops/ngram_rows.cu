#include <algorithm>

#include "cuda/ops/ngram_rows.h"
#include "cuda/raw_grids.cuh"
#include "cuda/reduce.cuh"

namespace strata {
namespace {

constexpr int kMostThreads = 256;

// Which row of the table a head reads for the tokens of one row.
__device__ __forceinline__ int64_t TableRow(const NgramRowsArgs& a, const int32_t* tokens,
                                            int head) {
  const int last = head / a.heads_per_ngram + 1;
  uint64_t hash = 0;
  for (int n = 0; n <= last; ++n) {
    hash ^= static_cast<uint64_t>(static_cast<int64_t>(tokens[n])) * a.multipliers[n];
  }
  const NgramHead& of = a.heads[head];
  return static_cast<int64_t>(hash % of.size) + of.offset;
}

// Copies a row to shared memory by whole words of 16 bytes, so that a row of host memory crosses
// the link in few pieces; returns its first byte there.
__device__ __forceinline__ const uint8_t* StageRow(const uint8_t* row, int row_bytes,
                                                   uint4* shared) {
  const int before = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
  const uint4* words = reinterpret_cast<const uint4*>(row - before);
  const int count = (before + row_bytes + 15) / 16;
  for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = words[i];
  __syncthreads();
  return reinterpret_cast<const uint8_t*>(shared) + before;
}

__global__ void __launch_bounds__(kMostThreads) NgramRowsKernel(const NgramRowsArgs a) {
  STRATA_SHARED(uint4, shared);
  const int head = blockIdx.x;
  const int64_t t = blockIdx.y;
  float* out = a.out + (t * a.num_heads + head) * a.num_cols;
  const int asked_live = *a.live;
  // Of a dead row too, whose tokens are there: its result is not used.
  const int64_t row = TableRow(a, a.tokens + t * a.ngram_size, head);
  if (t >= LiveRows(asked_live, a.num_rows)) {
    for (int i = threadIdx.x; i < a.num_cols; i += blockDim.x) out[i] = 0.0f;
    return;
  }
  const uint8_t* bytes = StageRow(a.rows + row * a.row_bytes, a.row_bytes, shared);
  for (int i = threadIdx.x; i < a.num_cols; i += blockDim.x) {
    out[i] = raw::ValueOfRow(a.type, bytes, i);
  }
}

}  // namespace

std::string NgramRows(const NgramRowsArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0) return "";
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(args.num_heads), static_cast<unsigned>(args.num_rows));
  shape.block = dim3(static_cast<unsigned>(std::min(kMostThreads, (args.num_cols + 31) / 32 * 32)));
  shape.shared_bytes = static_cast<size_t>(args.row_bytes + 30) / 16 * 16;
  shape.stream = stream;
  return Launch(NgramRowsKernel, shape, args);
}

}  // namespace strata
