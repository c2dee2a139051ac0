#include <algorithm>

#include "cuda/ops/gdn_chunk.h"
#include "cuda/ops/gdn_chunk_prepare.cuh"
#include "cuda/ops/gdn_chunk_scan.cuh"

namespace strata {
namespace {

using namespace gdn;

constexpr int kNormWarps = 8;

// New inputs of the convolution: the last before row `live`. Rows move up in place, one thread a
// channel.
__device__ __forceinline__ void MoveConvState(const ChunkParams& p, int channel, int num_live) {
  const int kept = static_cast<int>(p.a.num_taps) - 1;
  for (int i = 0; i < kept; ++i) {
    const int row = num_live - kept + i;
    const float value = row < 0 ? p.a.conv_state[(row + kept) * p.channels + channel]
                                : p.a.proj[row * p.stride + channel];
    p.a.new_conv_state[i * p.channels + channel] = value;
  }
}

// A warp has a row and a head. There are more threads than channels, so each takes one of them.
template <int kDim>
__global__ void __launch_bounds__(kNormWarps * 32)
    GdnNormKernel(const __grid_constant__ ChunkParams p) {
  using Lane = Run<kDim / 32>;
  const int value_heads = static_cast<int>(p.a.value_heads);
  const int num_live = LiveRows(*p.a.live, p.a.num_rows);
  const int thread = blockIdx.x * kNormWarps * 32 + threadIdx.x;
  if (thread < p.channels) MoveConvState(p, thread, num_live);
  const int row = thread / 32 / value_heads;
  const int head = thread / 32 % value_heads;
  if (row >= p.a.num_rows) return;
  const int own = threadIdx.x % 32 * (kDim / 32);
  Lane* y = reinterpret_cast<Lane*>(p.a.y + (row * value_heads + head) * kDim + own);
  if (row >= num_live) {
    *y = {};
    return;
  }
  Lane out = *y;
  const Lane z =
      *reinterpret_cast<const Lane*>(p.a.proj + row * p.stride + p.channels + head * kDim + own);
  const Lane weight = *reinterpret_cast<const Lane*>(p.a.norm_weight + own);
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) squares = __fmaf_rn(out.at[k], out.at[k], squares);
  const float scale = 1.0f / sqrtf(WarpSum(squares) / static_cast<float>(kDim) + p.a.eps);
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
    out.at[k] = out.at[k] * scale * weight.at[k] * Sigmoid(z.at[k]);
  }
  *y = out;
}

struct Sizes {
  int64_t keys, values, gates;  // bytes of each of a kind
};

Sizes SizesOf(int64_t num_rows, int64_t key_heads, int64_t value_heads, int64_t head_dim) {
  const int64_t chunks = num_rows / kGdnChunk;
  return {chunks * key_heads * (head_dim / 64) * kPieceBytes, chunks * value_heads * kPieceBytes,
          chunks * value_heads * kGateFloats * 4};
}

template <int kDim>
std::string Start(const ChunkParams& p, cudaStream_t stream) {
  const unsigned chunks = static_cast<unsigned>(p.a.num_rows / kGdnChunk);
  const unsigned value_heads = static_cast<unsigned>(p.a.value_heads);
  Shape prepare;
  prepare.grid = dim3(static_cast<unsigned>(p.a.key_heads), chunks);
  prepare.block = dim3(kPrepareWarps * 32);
  prepare.shared_bytes = sizeof(PrepareShared<kDim>);
  prepare.stream = stream;
  std::string error = Launch(GdnPrepareKernel<kDim>, prepare, p);
  if (!error.empty()) return error;
  Shape scan;
  scan.grid = dim3(value_heads, kDim / kScanColumns);
  scan.block = dim3(kScanWarps * 32);
  scan.shared_bytes = sizeof(ScanShared<kDim>);
  scan.stream = stream;
  error = Launch(GdnScanKernel<kDim>, scan, p);
  if (!error.empty()) return error;
  Shape norm;
  const unsigned warps = static_cast<unsigned>(p.a.num_rows) * value_heads;
  norm.grid = dim3((warps + kNormWarps - 1) / kNormWarps);
  norm.block = dim3(kNormWarps * 32);
  norm.stream = stream;
  return Launch(GdnNormKernel<kDim>, norm, p);
}

}  // namespace

bool HasGdnChunk(int64_t num_taps, int64_t value_heads, int64_t head_dim) {
  // An odd number of heads puts rows of proj at odd multiples of 8 bytes.
  return num_taps == 4 && value_heads % 2 == 0 && (head_dim == 64 || head_dim == 128);
}

int64_t GdnChunkWorkspace(int64_t num_rows, int64_t key_heads, int64_t value_heads,
                          int64_t head_dim) {
  const Sizes sizes = SizesOf(num_rows, key_heads, value_heads, head_dim);
  return 2 * sizes.keys + 2 * sizes.values + sizes.gates;
}

std::string GdnChunk(const GdnChunkArgs& args, cudaStream_t stream) {
  const GdnWindowArgs& a = args.window;
  if (!HasGdnChunk(a.num_taps, a.value_heads, a.head_dim)) return GdnWindow(a, stream);
  ChunkParams p = {};
  p.a = a;
  p.channels = static_cast<int>((2 * a.key_heads + a.value_heads) * a.head_dim);
  const int64_t stride = p.channels + a.value_heads * (a.head_dim + 2);
  const int64_t largest = std::max(a.num_rows * stride, a.value_heads * a.head_dim * a.head_dim);
  if (largest > INT32_MAX) {
    return std::to_string(a.num_rows) + " rows of " + std::to_string(stride) +
           " values, fewer expected in one call";
  }
  p.stride = static_cast<int>(stride);
  const Sizes sizes = SizesOf(a.num_rows, a.key_heads, a.value_heads, a.head_dim);
  p.keys = args.workspace;
  p.queries = p.keys + sizes.keys;
  p.inverse = p.queries + sizes.keys;
  p.weights = p.inverse + sizes.values;
  p.gates = reinterpret_cast<float*>(p.weights + sizes.values);
  return a.head_dim == 64 ? Start<64>(p, stream) : Start<128>(p, stream);
}

}  // namespace strata
