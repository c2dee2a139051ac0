#include "cuda/ops/gdn_parts.cuh"
#include "cuda/ops/gdn_window.h"

namespace strata {
namespace {

using namespace gdn;

// How many blocks of a key head have read its channels' old inputs. A launch leaves zeros behind,
// and all launches of a device are on its one compute stream, so no two of them count at once.
__device__ unsigned arrivals[kMostGdnKeyHeads];

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

// Every thread writes its channel's last inputs; those that heads share, only in the block that was
// the last to read them.
template <int kDim>
__device__ void WriteConvState(const GdnWindowArgs& a, const Channel<kDim>& channel, int place,
                               unsigned arrived, HeadShared<kDim>* shared) {
  if (place >= 2 * kDim) channel.WriteState(a);
  if (place == 3 * kDim - 1) {
    shared->writes_shared = arrived == gridDim.y;
    if (shared->writes_shared) {
      arrivals[blockIdx.x] = 0;
      __threadfence();
    }
  }
  __syncthreads();
  if (shared->writes_shared && place >= 0 && place < 2 * kDim) channel.WriteState(a);
}

template <int kRows>
__global__ void __launch_bounds__(kGroups * 4 * kRows) GdnWindowKernel(const GdnWindowArgs a) {
  constexpr int kDim = kGroups * kRows;
  STRATA_SHARED(HeadShared<kDim>, shared);
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int place = thread - kDim;  // of the thread's channel in q|k|v; negative: a column's thread
  const int state_at = HeadOfBlock() * kDim * kDim;

  // Everything is asked for before anything is waited for, the number of live rows too.
  const int asked_live = *a.live;
  Channel<kDim> channel;
  Column<kDim> column;
  Gates<kDim> gates;
  StatePart<kRows> part;
  if (place >= 0) channel.Ask(a, place);
  if (place < 0) column.Ask(a);
  if (thread == 32) gates.Ask(a);
  part.Load(a.state + state_at);
  const int num_live = LiveRows(asked_live, a.num_rows);
  ZeroDeadRows<kDim>(a, num_live);

  if (place >= 0 && num_live > 0) shared->mixed[0][place] = channel.Convolve(a, 0, num_live);
  __syncthreads();
  unsigned arrived = 0;  // only the last warp waits here, and only for its fence
  if (place == 3 * kDim - 1) {
    __threadfence();
    arrived = atomicAdd(arrivals + blockIdx.x, 1u) + 1;
  }
  for (int t = 0; t < num_live; ++t) {
    const float* mixed = shared->mixed[t % 2];
    if (thread < 32) ScaleVectors<kDim>(mixed, lane, &shared->scalars);
    if (thread == 32) gates.Compute(a, t, num_live, &shared->scalars);
    part.Share(mixed, shared);
    __syncthreads();
    const float decay = shared->scalars.decay;
    if (place < 0) column.Combine(mixed, shared);
    if (place >= 0 && t + 1 < num_live) {
      shared->mixed[(t + 1) % 2][place] = channel.Convolve(a, t + 1, num_live);
    }
    __syncthreads();
    part.Update(decay, mixed, shared->delta);
    if (thread < (kDim + 31) / 32 * 32) {
      const float squares = SumOfSquares<kDim>(shared->out, lane);
      if (place < 0) column.Write(a, t, num_live, squares);
    }
  }
  part.Store(a.new_state + state_at);
  WriteConvState(a, channel, place, arrived, shared);
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
  const int64_t largest = std::max(args.num_rows * 2 * heads * (args.head_dim + 1),
                                   args.value_heads * args.head_dim * args.head_dim);
  if (largest > INT32_MAX) {
    return std::to_string(args.num_rows) + " rows of " + std::to_string(heads) + " heads of " +
           std::to_string(args.head_dim) + ", fewer expected in one call";
  }
  return kStarters[args.head_dim / kGroups - 1](args, stream);
}

}  // namespace strata
