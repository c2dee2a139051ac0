// Two kernels. The first computes the norms and the products with `down` and `inject`, a block for
// each segment of the flattened streams; the second the products with `up` and the mix. The streams
// are written by the second only: every block of the first still reads the old ones.
#include <algorithm>

#include "cuda/numerics.cuh"
#include "cuda/ops/hyper_read.h"
#include "cuda/products.cuh"

namespace strata {
namespace {

constexpr int kDownWarps = 6;
constexpr int kUpWarps = 8;

struct Params {
  const float* streams;
  float* new_streams;
  const float* y;
  const float* beta;
  const float* norm;
  const int32_t* live;
  float* x;
  float* next_beta;
  float* scales;  // [T, J]                       1 / rms of each stream
  float* sums;    // [T, segments of J*D, R + J]  of down and inject
  int32_t num_rows, num_streams, width, rank, num_sums, down_segments, down_panels;
  float eps;
  bool injected;
  int32_t up_grid_at;  // of up's code book in the second kernel's shared memory
  PanelMatrix down, inject, up;
};

__device__ __forceinline__ float Written(const Params& p, int64_t row, int stream, int d) {
  return fmaf(p.beta[row * p.num_streams + stream], p.y[row * p.width + d],
              p.streams[(row * p.num_streams + stream) * p.width + d]);
}

// 1 / rms of one stream of one row, by the whole block; the same tree whatever else the block does.
__device__ __forceinline__ float InverseRms(const Params& p, int64_t row, int stream,
                                            float* scratch) {
  float sum = 0.0f;
  // Strided as 192 threads whatever the block, so that every block gets the same bits.
  for (int d = threadIdx.x; d < p.width; d += kDownWarps * 32) {
    const float value = Written(p, row, stream, d);
    sum = fmaf(value, value, sum);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  __syncthreads();  // the scratch of the call before is read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < kDownWarps; ++w) total += scratch[w];
  return 1.0f / sqrtf(total / static_cast<float>(p.width) + p.eps);
}

__global__ void __launch_bounds__(kDownWarps * 32)
    HyperDownKernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) unsigned char quantised[QuantizedBytes(kMostRows, 256)];
  __shared__ __align__(16) float normed[kMostRows * 256];
  __shared__ float scratch[kDownWarps];
  STRATA_SHARED(unsigned char, grids);  // of down, then of inject
  const int segment = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int panels = p.down_panels + (p.injected ? 1 : 0);
  const int per_block = (panels + gridDim.y - 1) / gridDim.y;
  const int first_panel = blockIdx.y * per_block;
  const int end_panel = min(first_panel + per_block, panels);
  for (int panel = first_panel + warp; panel < end_panel; panel += kDownWarps) {
    const PanelMatrix& m = panel < p.down_panels ? p.down : p.inject;
    const int own = panel < p.down_panels ? panel : 0;
    PrefetchUnit(m.bytes + own * m.panel_bytes + static_cast<int64_t>(segment) * m.unit_bytes,
                 m.unit_bytes, lane);
  }
  const int first_row = blockIdx.z * kMostRows;
  const int num_rows = min(kMostRows, *p.live - first_row);
  if (num_rows <= 0) return;
  const int down_copies = StageGridOf(p.down.type, grids);
  unsigned char* inject_grid = grids + GridBytes(p.down.type, GridCopies(p.down.type));
  const int inject_copies = p.injected ? StageGridOf(p.inject.type, inject_grid) : 0;
  const int begin = segment * 256;
  const int count = min(256, p.num_streams * p.width - begin);
  const int first_stream = begin / p.width;
  const int last_stream = (begin + count - 1) / p.width;
  for (int r = 0; r < num_rows; ++r) {
    const int64_t row = first_row + r;
    for (int s = first_stream; s <= last_stream; ++s) {
      const float scale = InverseRms(p, row, s, scratch);
      if (threadIdx.x == 0 && s * p.width >= begin && blockIdx.y == 0) {
        p.scales[row * p.num_streams + s] = scale;
      }
      const int from = max(begin, s * p.width);
      const int to = min(begin + count, (s + 1) * p.width);
      for (int i = from + threadIdx.x; i < to; i += blockDim.x) {
        normed[r * 256 + i - begin] = Written(p, row, s, i - s * p.width) * scale * p.norm[i];
      }
    }
  }
  __syncthreads();
  const QuantizedShared q = QuantizedAt(quantised, kMostRows, 256);
  if (p.down.quantised || (p.injected && p.inject.quantised)) {
    // Rows lie 256 apart whatever the segment's length.
    const int blocks = count / 32;
    for (int job = warp; job < num_rows * blocks; job += kDownWarps) {
      const int r = job / blocks;
      const int b = job % blocks;
      QuantizeBlockByWarp(normed[r * 256 + b * 32 + lane], lane, q.codes + r * 256 + b * 32,
                          q.scales + r * 8 + b, q.sums + (r * 8 + b) * 2);
    }
    __syncthreads();
  }
  Rows rows = {q.codes, q.scales, q.sums, normed, 256, nullptr, 0};
  for (int panel = first_panel + warp; panel < end_panel; panel += kDownWarps) {
    const bool is_down = panel < p.down_panels;
    const PanelMatrix& m = is_down ? p.down : p.inject;
    const int own = is_down ? panel : 0;
    if (own * 32 + lane >= m.rows) continue;
    const uint8_t* unit =
        m.bytes + own * m.panel_bytes + static_cast<int64_t>(segment) * m.unit_bytes;
    rows.grid = reinterpret_cast<const uint32_t*>(is_down ? grids : inject_grid);
    rows.grid_copies = is_down ? down_copies : inject_copies;
    float acc[kMostRows];
    SegmentDot(m.type, unit, lane, count / 32, rows, 0, num_rows, acc);
    const int column = is_down ? panel * 32 + lane : p.rank + lane;
    for (int r = 0; r < num_rows; ++r) {
      p.sums[((first_row + r) * static_cast<int64_t>(p.down_segments) + segment) * p.num_sums +
             column] = acc[r];
    }
  }
}

// A product's total: the segments' sums in ascending order, from +0 (contract T).
__device__ __forceinline__ float Total(const Params& p, int64_t row, int column) {
  float total = 0.0f;
  const float* sums = p.sums + row * p.down_segments * p.num_sums + column;
  for (int s = 0; s < p.down_segments; ++s) total = __fadd_rn(total, sums[s * p.num_sums]);
  return total;
}

__global__ void __launch_bounds__(kUpWarps * 32) HyperUpKernel(const __grid_constant__ Params p) {
  STRATA_SHARED(unsigned char, shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int segments = (p.rank + 255) / 256;
  const int tile = blockIdx.x;  // columns [32 tile, 32 tile + 32) of every stream
  const int panels_of_stream = p.width / 32;
  const int jobs = p.num_streams * segments;
  for (int job = warp; job < jobs; job += kUpWarps) {
    const int panel = job / segments * panels_of_stream + tile;
    PrefetchUnit(p.up.bytes + panel * p.up.panel_bytes +
                     static_cast<int64_t>(job % segments) * p.up.unit_bytes,
                 p.up.unit_bytes, lane);
  }
  const int first_row = blockIdx.y * kMostRows;
  const int num_live = *p.live;
  const int num_rows = min(kMostRows, num_live - first_row);
  const int last_row = min(first_row + kMostRows, p.num_rows);
  // Dead rows: their streams stay, the rest is zero.
  for (int row = max(first_row, num_live) + warp; row < last_row; row += kUpWarps) {
    const int d = tile * 32 + lane;
    p.x[static_cast<int64_t>(row) * p.width + d] = 0.0f;
    for (int s = 0; s < p.num_streams; ++s) {
      const int64_t at = (static_cast<int64_t>(row) * p.num_streams + s) * p.width + d;
      if (p.new_streams != p.streams) p.new_streams[at] = p.streams[at];
      if (tile == 0 && lane == 0) p.next_beta[row * p.num_streams + s] = 0.0f;
    }
  }
  if (num_rows <= 0) return;
  float* mixed = reinterpret_cast<float*>(shared);  // [kMostRows, R]
  float* products = mixed + kMostRows * p.rank;     // [J, segments, kMostRows, 32]
  unsigned char* codes = reinterpret_cast<unsigned char*>(products + jobs * kMostRows * 32);
  const int copies = StageGridOf(p.up.type, shared + p.up_grid_at);
  const float share = static_cast<float>(p.num_streams);
  for (int i = threadIdx.x; i < num_rows * p.rank; i += blockDim.x) {
    const int r = i / p.rank;
    mixed[i] = SiluMul(Total(p, first_row + r, i - r * p.rank) / share, 1.0f);
  }
  if (tile == 0) {
    for (int i = threadIdx.x; i < num_rows * p.num_streams; i += blockDim.x) {
      const int r = i / p.num_streams;
      const int s = i - r * p.num_streams;
      float beta = 0.0f;
      if (p.injected) {
        const float logit = Total(p, first_row + r, p.rank + s) / share;
        beta = 2.0f / (1.0f + expf(-logit));
      }
      p.next_beta[(first_row + r) * p.num_streams + s] = beta;
    }
  }
  __syncthreads();
  const QuantizedShared q = QuantizedAt(codes, kMostRows, p.rank);
  if (p.up.quantised) QuantizeRows(mixed, p.rank, num_rows, p.rank, q);
  const Rows rows = {q.codes, q.scales, q.sums,
                     mixed,   p.rank,   reinterpret_cast<const uint32_t*>(shared + p.up_grid_at),
                     copies};
  for (int job = warp; job < jobs; job += kUpWarps) {
    const int segment = job % segments;
    const int panel = job / segments * panels_of_stream + tile;
    float acc[kMostRows];
    MultiplySegment(p.up, p.up.bytes, panel, segment, rows, num_rows, lane, acc);
    for (int r = 0; r < num_rows; ++r) products[(job * kMostRows + r) * 32 + lane] = acc[r];
  }
  __syncthreads();
  const int d = tile * 32 + lane;
  for (int r = warp; r < num_rows; r += kUpWarps) {
    const int64_t row = first_row + r;
    float sum = 0.0f;
    for (int s = 0; s < p.num_streams; ++s) {
      float gate = 0.0f;
      for (int g = 0; g < segments; ++g) {
        gate = __fadd_rn(gate, products[((s * segments + g) * kMostRows + r) * 32 + lane]);
      }
      const float value = Written(p, row, s, d);
      const float normed = value * p.scales[row * p.num_streams + s] * p.norm[s * p.width + d];
      sum = fmaf(1.0f / (1.0f + expf(-gate)), normed, sum);
      p.new_streams[(row * p.num_streams + s) * p.width + d] = value;
    }
    p.x[row * p.width + d] = sum / share;
  }
}

}  // namespace

int64_t HyperReadWorkspace(int64_t num_rows, int64_t num_streams, int64_t width, int64_t rank) {
  const int64_t segments = (num_streams * width + 255) / 256;
  return num_rows * num_streams + num_rows * segments * (rank + num_streams);
}

std::string HyperRead(const HyperReadArgs& a, cudaStream_t stream) {
  Params p = {};
  p.streams = a.streams;
  p.new_streams = a.new_streams;
  p.y = a.y;
  p.beta = a.beta;
  p.norm = a.norm;
  p.live = a.live;
  p.x = a.x;
  p.next_beta = a.next_beta;
  p.scales = a.workspace;
  p.sums = a.workspace + a.num_rows * a.num_streams;
  p.num_rows = static_cast<int32_t>(a.num_rows);
  p.num_streams = static_cast<int32_t>(a.num_streams);
  p.width = static_cast<int32_t>(a.width);
  p.rank = static_cast<int32_t>(a.down->rows);
  p.num_sums = p.rank + p.num_streams;
  p.down_segments = static_cast<int32_t>(a.down->segments());
  p.down_panels = static_cast<int32_t>(a.down->panels());
  p.eps = a.eps;
  p.injected = a.inject != nullptr;
  p.down = ViewOf(*a.down);
  if (p.injected) p.inject = ViewOf(*a.inject);
  p.up = ViewOf(*a.up);
  const unsigned groups = static_cast<unsigned>((a.num_rows + kMostRows - 1) / kMostRows);
  const int panels = p.down_panels + (p.injected ? 1 : 0);
  Shape down;
  down.grid = dim3(static_cast<unsigned>(p.down_segments),
                   static_cast<unsigned>((panels + kDownWarps - 1) / kDownWarps), groups);
  down.block = dim3(kDownWarps * 32);
  down.shared_bytes = GridSharedBytes(*a.down) + (p.injected ? GridSharedBytes(*a.inject) : 0);
  down.stream = stream;
  const std::string error = Launch(HyperDownKernel, down, p);
  if (!error.empty()) return error;
  const int64_t segments = (p.rank + 255) / 256;
  Shape up;
  up.grid = dim3(static_cast<unsigned>(p.width / 32), groups);
  up.block = dim3(kUpWarps * 32);
  up.shared_bytes =
      static_cast<size_t>(kMostRows * p.rank * 4 + p.num_streams * segments * kMostRows * 32 * 4) +
      (p.up.quantised ? QuantizedBytes(kMostRows, p.rank) : 0);
  up.shared_bytes = (up.shared_bytes + 15) / 16 * 16;
  p.up_grid_at = static_cast<int32_t>(up.shared_bytes);
  up.shared_bytes += GridSharedBytes(*a.up);
  up.stream = stream;
  return Launch(HyperUpKernel, up, p);
}

}  // namespace strata
