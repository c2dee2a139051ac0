// hyper_read for many rows, in three kernels on matrix units (split_mma.cuh: the activations as two
// bfloat16, the weights as they are).
//
// The first writes the streams and multiplies them by `down`: a block has 64 rows of one stream and
// all of down's columns, so a value is read once. A stream's 1 / rms is a factor of its whole sum,
// which is scaled when the stream has been read. The second adds the streams' sums. The third
// multiplies by `up` and mixes. No sum depends on the number of rows or on a row's place. Devices
// with group instructions have kernels of their own (hyper_read_wide.h).
#include <algorithm>

#include "cuda/ops/hyper_read_tiles.h"
#include "cuda/ops/hyper_read_tiles_up.cuh"
#include "cuda/ops/hyper_read_wide.h"

namespace strata {
namespace {

using namespace hyper;

constexpr int kFewRank = 64;
constexpr int kMostRank = 320;
constexpr int64_t kMostWidth = 2560;  // whose gamma fits shared memory beside the rest
constexpr int kJoinThreads = 256;

// The input of up, and the next beta: a thread has a pair of a row's columns, or one stream's beta.
__global__ void __launch_bounds__(kJoinThreads)
    HyperJoinKernel(const __grid_constant__ TileParams p) {
  const int num_live = LiveRows(*p.live, p.num_rows);
  const int row = blockIdx.x;
  if (threadIdx.x < kStreams && (row >= num_live || !p.has_inject)) {
    p.next_beta[row * kStreams + threadIdx.x] = 0.0f;
  }
  if (row >= num_live) return;
  if (threadIdx.x < kStreams && p.has_inject) {
    float sum = 0.0f;
    for (int s = 0; s < kStreams; ++s) {
      sum += p.injected[(row * kStreams + s) * kStreams + threadIdx.x];
    }
    p.next_beta[row * kStreams + threadIdx.x] = 2.0f * Sigmoid(sum / kStreams);
  }
  for (int column = threadIdx.x * 2; column < p.rank; column += kJoinThreads * 2) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const float2 of_stream =
          *reinterpret_cast<const float2*>(p.sums + (row * kStreams + s) * p.rank + column);
      sum.x += of_stream.x;
      sum.y += of_stream.y;
    }
    sum = make_float2(SiluMul(sum.x / kStreams, 1.0f), SiluMul(sum.y / kStreams, 1.0f));
    const SplitPair pair = Split(sum.x, sum.y);
    unsigned char* to = p.mixed + MixedAt(row, column, p.rank);
    *reinterpret_cast<uint32_t*>(to) = pair.high;
    *reinterpret_cast<uint32_t*>(to + kMixedPlane) = pair.low;
  }
}

template <int kTiles>
std::string LaunchDown(const TileParams& p, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>(p.num_rows / kDownRows), kStreams);
  shape.block = dim3(kDownThreads);
  shape.shared_bytes = DownSharedBytes<kTiles>(p.width);
  shape.stream = stream;
  return Launch(HyperDownTileKernel<kTiles>, shape, p);
}

std::string LaunchRest(const TileParams& p, cudaStream_t stream) {
  Shape join;
  join.grid = dim3(static_cast<unsigned>(p.num_rows));
  join.block = dim3(kJoinThreads);
  join.stream = stream;
  const std::string error = Launch(HyperJoinKernel, join, p);
  if (!error.empty()) return error;
  Shape up;
  up.grid = dim3(static_cast<unsigned>(p.width / kUpColumns),
                 static_cast<unsigned>(p.num_rows / kUpRows));
  up.block = dim3(kUpThreads);
  up.shared_bytes = sizeof(UpShared);
  up.stream = stream;
  return Launch(HyperUpTileKernel, up, p);
}

int64_t ScalesAndSums(int64_t num_rows, int64_t num_streams, int64_t rank) {
  return num_rows * num_streams * (1 + rank + num_streams);
}

}  // namespace

bool HasHyperReadTiles(const HyperReadArgs& a) {
  const auto held = [](const DeviceMatrix* m) {
    return m == nullptr || m->type->type == GgmlType::kBF16;
  };
  return a.num_rows % kUpRows == 0 && a.num_streams == kStreams && a.width % kUpColumns == 0 &&
         a.width <= kMostWidth && a.down->rows % 32 == 0 && a.down->rows <= kMostRank &&
         held(a.down) && held(a.inject) && held(a.up);
}

int64_t HyperReadTilesWorkspace(int64_t num_rows, int64_t num_streams, int64_t rank) {
  return ScalesAndSums(num_rows, num_streams, rank) + num_rows * rank;
}

std::string HyperReadTiles(const HyperReadArgs& a, cudaStream_t stream) {
  TileParams p = {};
  p.streams = a.streams;
  p.new_streams = a.new_streams;
  p.y = a.y;
  p.beta = a.beta;
  p.norm = a.norm;
  p.live = a.live;
  p.x = a.x;
  p.next_beta = a.next_beta;
  p.num_rows = static_cast<int32_t>(a.num_rows);
  p.width = static_cast<int32_t>(a.width);
  p.rank = static_cast<int32_t>(a.down->rows);
  p.eps = a.eps;
  p.has_inject = a.inject != nullptr;
  p.down = ViewOf(*a.down);
  if (p.has_inject) p.inject = ViewOf(*a.inject);
  p.up = ViewOf(*a.up);
  p.scales = a.workspace;
  p.injected = p.scales + a.num_rows * kStreams;
  p.sums = p.injected + a.num_rows * kStreams * kStreams;
  p.mixed =
      reinterpret_cast<unsigned char*>(a.workspace + ScalesAndSums(a.num_rows, kStreams, p.rank));
  if (HasWideHyperRead(p.rank)) return LaunchWideHyperRead(p, stream);
  const std::string error = p.rank <= kFewRank ? LaunchDown<kFewRank / 32>(p, stream)
                                               : LaunchDown<kMostRank / 32>(p, stream);
  return error.empty() ? LaunchRest(p, stream) : error;
}

}  // namespace strata
