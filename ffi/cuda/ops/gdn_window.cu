#include "cuda/ops/gdn_parts.cuh"
#include "cuda/ops/gdn_window.h"

namespace strata {
namespace {

using namespace gdn;

// How many blocks of a key head have read its channels' old inputs. A launch leaves zeros behind,
// and all launches of a device are on its one compute stream, so no two of them count at once.
__device__ unsigned arrivals[kMostGdnKeyHeads];

// Says that this block has read the old inputs of its key head; returns how many blocks have.
__device__ unsigned Arrive() {
  __threadfence();
  return atomicAdd(arrivals + blockIdx.x, 1u) + 1;
}

template <int kDim>
__device__ void ZeroDeadRows(const GdnWindowArgs& a, int num_live) {
  float* y = a.y + HeadOfBlock() * kDim + threadIdx.x % kDim;
#pragma unroll 1
  for (int t = num_live + threadIdx.x / kDim; t < a.num_rows; t += 4) {
    y[t * static_cast<int>(a.value_heads) * kDim] = 0.0f;
  }
}

template <int kDim>
__device__ float SumOfSquares(const float* values, int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int i = lane; i < kDim; i += 32) sum = __fmaf_rn(values[i], values[i], sum);
  return WarpSum(sum);
}

// Every thread writes its channel's inputs; those that heads share, only in the block that was the
// last to read them.
template <int kDim>
__device__ void WriteConvState(const GdnWindowArgs& a, const Channel<kDim>& channel, int place,
                               const Span& span, unsigned arrived, HeadShared<kDim>* shared) {
  if (place >= 2 * kDim) channel.WriteState(a, span);
  if (place == 3 * kDim - 1) {
    shared->writes_shared = arrived == gridDim.y;
    if (shared->writes_shared) {
      arrivals[blockIdx.x] = 0;
      __threadfence();
    }
  }
  __syncthreads();
  if (shared->writes_shared && place >= 0 && place < 2 * kDim) channel.WriteState(a, span);
}

template <int kRows>
__global__ void __launch_bounds__(kGroups * 4 * kRows) GdnWindowKernel(const GdnWindowArgs a) {
  constexpr int kDim = kGroups * kRows;
  STRATA_SHARED(HeadShared<kDim>, shared);
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int place = thread - kDim;  // of the thread's channel in q|k|v; negative: a column's thread
  const int state_at = HeadOfBlock() * kDim * kDim;

  // Everything is asked for before anything is waited for, the numbers of rows too.
  const int asked_live = *a.live;
  const int asked_kept = a.num_pending > 0 ? *a.kept : 0;
  const int asked_certain = a.num_pending > 0 ? *a.certain : INT32_MAX;
  Channel<kDim> channel;
  Column<kDim> column;
  Gates<kDim> gates;
  StatePart<kRows> part;
  if (place >= 0) channel.Ask(a, place);
  if (place < 0) column.Ask(a);
  if (thread == 32) gates.Ask(a);
  part.Load(a.state + state_at);
  const Span span = SpanOf(a, asked_kept, asked_certain, asked_live);
  const int num_live = span.total - span.kept;
  ZeroDeadRows<kDim>(a, num_live);

  if (place >= 0) channel.Begin(span);
  if (thread == 32) gates.Begin(a, span);
  if (place >= 0 && span.total > 0) shared->mixed[0][place] = channel.Convolve(a, 0, span);
  __syncthreads();
  unsigned arrived = 0;  // only the last warp waits here, and only for its fence
  if (place == 3 * kDim - 1 && span.kept == 0) arrived = Arrive();
  for (int v = 0; v < span.total; ++v) {
    if (v == span.committed) part.Store(a.new_state + state_at);
    const float* mixed = shared->mixed[v % 2];
    if (thread < 32) ScaleVectors<kDim>(mixed, lane, &shared->scalars);
    if (thread == 32) gates.Compute(a, v, span, &shared->scalars);
    part.Share(mixed, shared);
    __syncthreads();
    const float decay = shared->scalars.decay;
    if (place < 0) column.Combine(mixed, shared);
    if (place >= 0 && v + 1 < span.total) {
      shared->mixed[(v + 1) % 2][place] = channel.Convolve(a, v + 1, span);
    }
    __syncthreads();
    part.Update(decay, mixed, shared->delta);
    if (thread < (kDim + 31) / 32 * 32) {
      const float squares = SumOfSquares<kDim>(shared->out, lane);
      if (place < 0 && v >= span.kept) column.Write(a, v - span.kept, num_live, squares);
    }
  }
  if (span.committed == span.total) part.Store(a.new_state + state_at);
  // Rows that are replayed have been read by now, all of them, at the loop's barriers.
  if (place == 3 * kDim - 1 && span.kept > 0) arrived = Arrive();
  if (thread == 32) gates.WriteState(a, span);
  WriteConvState(a, channel, place, span, arrived, shared);
}

template <int kRows>
std::string Start(const GdnWindowArgs& args, cudaStream_t stream) {
  constexpr int kDim = kGroups * kRows;
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(args.key_heads),
                    static_cast<unsigned>(args.value_heads / args.key_heads));
  shape.block = dim3(4 * kDim);
  shape.shared_bytes = sizeof(HeadShared<kDim>);
  shape.stream = stream;
  return Launch(GdnWindowKernel<kRows>, shape, args);
}

}  // namespace

std::string GdnWindow(const GdnWindowArgs& args, cudaStream_t stream) {
  using Starter = std::string (*)(const GdnWindowArgs&, cudaStream_t);
  constexpr Starter kStarters[] = {Start<1>, Start<2>, Start<3>, Start<4>,
                                   Start<5>, Start<6>, Start<7>, Start<8>};
  static_assert(kGroups * 8 == kMostGdnDim);
  const int64_t heads = args.key_heads + args.value_heads;
  const int64_t largest =
      std::max((args.num_rows + args.num_pending) * 2 * heads * (args.head_dim + 1),
               args.value_heads * args.head_dim * args.head_dim);
  if (largest > INT32_MAX) {
    return std::to_string(args.num_rows) + " rows of " + std::to_string(heads) + " heads of " +
           std::to_string(args.head_dim) + ", fewer expected in one call";
  }
  return kStarters[args.head_dim / kGroups - 1](args, stream);
}

}  // namespace strata
