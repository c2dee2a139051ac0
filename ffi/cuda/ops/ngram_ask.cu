#include <algorithm>

#include "cuda/bell.cuh"
#include "cuda/ops/ngram_ask.h"
#include "cuda/reduce.cuh"

namespace strata {
namespace {

constexpr int kMostThreads = 1024;

// One block: the letter is short, and what counts is that it leaves soon.
__global__ void __launch_bounds__(kMostThreads) NgramAskKernel(const NgramAskArgs a) {
  const TableMailboxAt& m = a.mailbox;
  TableMailboxState* state = m.state;
  const int count = LiveRows(*a.live, a.num_rows) * a.hash.num_heads;
  const uint64_t epoch = state->epoch + 1;
  const bool failed = state->failed != 0;
  if (count == 0 || failed) {
    if (threadIdx.x == 0) state->awaited = 0;
    return;
  }
  auto* letter = reinterpret_cast<TableLetter*>(m.box->letters + epoch % 2 * m.sizes.letter_bytes);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int32_t* tokens = a.tokens + int64_t{i / a.hash.num_heads} * a.hash.ngram_size;
    letter->rows[i] = TableRow(a.hash, tokens, i % a.hash.num_heads);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  letter->count = count;
  state->looking = 0;
  state->epoch = epoch;
  state->awaited = epoch;
  __threadfence_system();
  StoreReleaseSystem(&m.box->doorbell, epoch);
}

}  // namespace

std::string NgramAsk(const NgramAskArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0) return "";
  Shape shape;
  shape.grid = dim3(1);
  const int wanted = args.num_rows * args.hash.num_heads;
  shape.block = dim3(static_cast<unsigned>(std::min(kMostThreads, (wanted + 31) / 32 * 32)));
  shape.stream = stream;
  return Launch(NgramAskKernel, shape, args);
}

}  // namespace strata
