#include <algorithm>

#include "cuda/bell.cuh"
#include "cuda/ops/ngram_rows.h"
#include "cuda/raw_grids.cuh"
#include "cuda/reduce.cuh"

namespace strata {
namespace {

constexpr int kMostThreads = 256;

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

__device__ __forceinline__ void WriteRow(const NgramRowsArgs& a, const uint8_t* bytes, float* out) {
  for (int i = threadIdx.x; i < a.num_cols; i += blockDim.x) {
    out[i] = raw::ValueOfRow(a.type, bytes, i);
  }
}

__device__ __forceinline__ void Fill(const NgramRowsArgs& a, float value, float* out) {
  for (int i = threadIdx.x; i < a.num_cols; i += blockDim.x) out[i] = value;
}

__global__ void __launch_bounds__(kMostThreads) NgramRowsKernel(const NgramRowsArgs a) {
  STRATA_SHARED(uint4, shared);
  const int head = blockIdx.x;
  const int64_t t = blockIdx.y;
  float* out = a.out + (t * a.hash.num_heads + head) * a.num_cols;
  const int asked_live = *a.live;
  // Of a dead row too, whose tokens are there: its result is not used.
  const int64_t row = TableRow(a.hash, a.tokens + t * a.hash.ngram_size, head);
  if (t >= LiveRows(asked_live, a.num_rows)) {
    Fill(a, 0.0f, out);
    return;
  }
  WriteRow(a, StageRow(a.rows + row * a.row_bytes, a.row_bytes, shared), out);
}

// One thread of a block: returns when the answer is there or will not come. Whether it is there.
__device__ inline bool AwaitTable(const TableMailboxAt& m) {
  TableMailboxState* state = m.state;
  const uint64_t epoch = *static_cast<const volatile uint64_t*>(&state->awaited);
  if (epoch == 0) return false;
  if (atomicAdd(&state->looking, 1u) == 0) {
    if (AwaitAnswer(m.box, state)) {
      const uint64_t refused = *static_cast<const volatile uint64_t*>(&m.box->refused);
      *static_cast<volatile uint32_t*>(&state->refused) = refused == epoch ? 1u : 0u;
      StoreReleaseSystem(&state->answered, epoch);
    }
  } else {
    AwaitNews(state);
  }
  return LoadAcquireSystem(&state->answered) == epoch &&
         *static_cast<const volatile uint32_t*>(&state->refused) == 0;
}

// The same from the host's answer. Its bytes were written while this step ran: past every cache.
__global__ void __launch_bounds__(kMostThreads) NgramAnswerKernel(const NgramRowsArgs a) {
  STRATA_SHARED(uint32_t, shared);
  __shared__ int is_there;
  const int64_t t = blockIdx.y;
  const int64_t place = t * a.hash.num_heads + blockIdx.x;
  float* out = a.out + place * a.num_cols;
  if (t >= LiveRows(*a.live, a.num_rows)) {
    Fill(a, 0.0f, out);
    return;
  }
  if (threadIdx.x == 0) is_there = AwaitTable(a.mailbox) ? 1 : 0;
  __syncthreads();
  if (is_there == 0) {
    Fill(a, __uint_as_float(0x7fc00000u), out);
    return;
  }
  const uint64_t half = *static_cast<const volatile uint64_t*>(&a.mailbox.state->awaited) % 2;
  const int64_t first = place * a.row_bytes;
  const auto* words = reinterpret_cast<const volatile uint32_t*>(
      a.mailbox.answers + half * a.mailbox.sizes.answer_bytes + first / 4 * 4);
  const int before = static_cast<int>(first % 4);
  const int count = (before + a.row_bytes + 3) / 4;
  for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = words[i];
  __syncthreads();
  WriteRow(a, reinterpret_cast<const uint8_t*>(shared) + before, out);
}

}  // namespace

std::string NgramRows(const NgramRowsArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0) return "";
  Shape shape;
  shape.grid =
      dim3(static_cast<unsigned>(args.hash.num_heads), static_cast<unsigned>(args.num_rows));
  shape.block = dim3(static_cast<unsigned>(std::min(kMostThreads, (args.num_cols + 31) / 32 * 32)));
  shape.shared_bytes = static_cast<size_t>(args.row_bytes + 30) / 16 * 16;
  shape.stream = stream;
  return args.rows != nullptr ? Launch(NgramRowsKernel, shape, args)
                              : Launch(NgramAnswerKernel, shape, args);
}

}  // namespace strata
