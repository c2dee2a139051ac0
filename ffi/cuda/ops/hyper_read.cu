// Two kernels. The first computes the norms and the products with `down` and `inject`, a block for
// each segment of the flattened streams; the second the products with `up` and the mix. The streams
// are written by the second only: every block of the first still reads the old ones.
//
// Each comes twice. The mixers of most files are BF16, large and read at every block of every
// layer: for them warps hold single blocks of 32 in registers, many of them side by side. The
// others leave a segment to a warp.
#include <algorithm>

#include "cuda/ops/hyper_read.h"
#include "cuda/ops/hyper_read_parts.cuh"
#include "cuda/ops/hyper_read_tiles.h"

namespace strata {
namespace {

constexpr int kDownWarps = 8;
constexpr int kUpWarps = 8;

// Of the kernels for BF16: a block has four panels of `down`, and four warps share a panel.
constexpr int kHeldPanels = 4;
constexpr int kHeldBlocks = 2;  // that a warp holds at a time
constexpr int kHeldDownWarps = kHeldPanels * 8 / kHeldBlocks;
constexpr int kHeldUpWarps = 20;  // 4 streams of 320 columns make 40 blocks
constexpr int kHeldUpMostBytes = 96 * 1024;

__global__ void __launch_bounds__(kDownWarps * 32)
    HyperDownKernel(const __grid_constant__ HyperParams p) {
  __shared__ __align__(16) unsigned char quantised[QuantizedBytes(kMostRows, 256)];
  __shared__ __align__(16) float normed[kMostRows * 256];
  __shared__ float scratch[2 * kDownWarps];
  STRATA_SHARED(unsigned char, grids);  // of down, then of inject
  const int segment = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int panels = p.down_panels + (p.injected ? 1 : 0);
  const int per_block = (panels + gridDim.y - 1) / gridDim.y;
  const int first_panel = blockIdx.y * per_block;
  const int end_panel = min(first_panel + per_block, panels);
  const auto unit_of = [&](int panel) {
    const PanelMatrix& m = panel < p.down_panels ? p.down : p.inject;
    const int own = panel < p.down_panels ? panel : 0;
    return UnitAt(m, own, segment);
  };
  unsigned char* inject_grid = grids + GridBytes(p.down.type, GridCopies(p.down.type));
  int down_copies = 0, inject_copies = 0;
  const int num_rows = NormRows<kDownWarps>(p, normed, scratch, [&] {
    for (int panel = first_panel + warp; panel < end_panel; panel += kDownWarps) {
      const PanelMatrix& m = panel < p.down_panels ? p.down : p.inject;
      PrefetchUnit(unit_of(panel), m.unit_bytes, lane);
    }
    down_copies = StageGridOf(p.down.type, grids);
    if (p.injected) inject_copies = StageGridOf(p.inject.type, inject_grid);
  });
  if (num_rows <= 0) return;
  PrefetchUp(p);
  const int first_row = blockIdx.z * p.down_rows;
  const int blocks = min(8, p.down.cols / 32 - segment * 8);
  const QuantizedShared q = QuantizedAt(quantised, kMostRows, 256);
  if (p.down.quantised || (p.injected && p.inject.quantised)) {
    // Rows lie 256 apart whatever the segment's length.
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
    if ((is_down ? panel : 0) * 32 + lane >= m.rows) continue;
    rows.grid = reinterpret_cast<const uint32_t*>(is_down ? grids : inject_grid);
    rows.grid_copies = is_down ? down_copies : inject_copies;
    float acc[kMostRows];
    SegmentDot(m.type, unit_of(panel), lane, blocks, rows, 0, num_rows, acc);
    for (int r = 0; r < num_rows; ++r) {
      SumsOf(p, first_row + r, panel)[segment * 32 + lane] = acc[r];
    }
  }
}

__global__ void __launch_bounds__(kHeldDownWarps * 32)
    HyperDownHeldKernel(const __grid_constant__ HyperParams p) {
  __shared__ __align__(16) float normed[kMostRows * 256];
  __shared__ float products[kMostRows * kHeldPanels * 8 * 32];
  __shared__ float scratch[2 * kHeldDownWarps];
  const int segment = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int place = warp / 8 * kHeldBlocks;  // of the warp's first panel within the block
  const int own_block = warp % 8;
  const int blocks = min(8, p.down.cols / 32 - segment * 8);
  const auto rows_of = [&](int panel) {  // of the matrix that are in it
    if (panel < p.down_panels) return p.down.rows - panel * 32;
    return panel == p.down_panels && p.injected ? p.inject.rows : 0;
  };
  Held held[kHeldBlocks] = {};
  const int num_rows = NormRows<kHeldDownWarps>(p, normed, scratch, [&] {
#pragma unroll
    for (int k = 0; k < kHeldBlocks; ++k) {
      const int panel = blockIdx.y * kHeldPanels + place + k;
      const bool is_down = panel < p.down_panels;
      const PanelMatrix& m = is_down ? p.down : p.inject;
      const uint8_t* unit = UnitAt(m, is_down ? panel : 0, segment);
      if (lane < rows_of(panel) && own_block < blocks) Hold(unit, own_block, lane, &held[k]);
    }
  });
  if (num_rows <= 0) return;
  PrefetchUp(p);
  // A block past the end gives sums that are not used.
  MultiplyHeld(held, normed + own_block * 32, 256, num_rows, [&](int k, int r, float product) {
    products[((r * kHeldPanels + place + k) * 8 + own_block) * 32 + lane] = product;
  });
  __syncthreads();
  for (int job = warp; job < num_rows * kHeldPanels; job += kHeldDownWarps) {
    const int panel_of_job = blockIdx.y * kHeldPanels + job % kHeldPanels;
    if (lane >= rows_of(panel_of_job)) continue;
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
      if (b < blocks) sum = __fadd_rn(sum, products[(job * 8 + b) * 32 + lane]);
    }
    const int row = blockIdx.z * p.down_rows + job / kHeldPanels;
    SumsOf(p, row, panel_of_job)[segment * 32 + lane] = sum;
  }
}

__global__ void __launch_bounds__(kUpWarps * 32)
    HyperUpKernel(const __grid_constant__ HyperParams p) {
  STRATA_SHARED(unsigned char, shared);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int segments = (p.rank + 255) / 256;
  const int tile = blockIdx.x;  // columns [32 tile, 32 tile + 32) of every stream
  const int panels_of_stream = p.width / 32;
  const int jobs = p.num_streams * segments;
  float* mixed = reinterpret_cast<float*>(shared);  // [kMostRows, R]
  float* products = mixed + kMostRows * p.rank;     // [J, segments, kMostRows, 32]
  float* terms = products + jobs * kMostRows * 32;  // [kMostRows, J, 32]
  unsigned char* codes = reinterpret_cast<unsigned char*>(terms + kMostRows * p.num_streams * 32);
  int copies = 0;
  const int num_rows = MixedRows(p, mixed, [&] {
    for (int job = warp; job < jobs; job += kUpWarps) {
      const int panel = job / segments * panels_of_stream + tile;
      PrefetchUnit(UnitAt(p.up, panel, job % segments), p.up.unit_bytes, lane);
    }
    copies = StageGridOf(p.up.type, shared + p.up_grid_at);
    WaitForKernelBefore();
    LetNextKernelBegin();
  });
  if (num_rows <= 0) return ClearDeadRows(p);
  const auto first = Divided(warp, p.num_streams);
  MixInput input = {};
  if (first.quotient < num_rows) input = LoadMixInput(p, first.quotient, first.rest);
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
  ClearDeadRows(p);
  Mix(p, num_rows, input, terms, [&](int r, int s) {
    float gate = 0.0f;
    for (int g = 0; g < segments; ++g) {
      gate = __fadd_rn(gate, products[((s * segments + g) * kMostRows + r) * 32 + lane]);
    }
    return gate;
  });
}

// Shared: mixed [kMostRows, R], products [kMostRows, J, blocks of R, 32], terms [kMostRows, J, 32].
int64_t HeldUpBytes(int64_t num_streams, int64_t rank) {
  return 4 * kMostRows * (rank + num_streams * rank + num_streams * 32);
}

__global__ void __launch_bounds__(kHeldUpWarps * 32)
    HyperUpHeldKernel(const __grid_constant__ HyperParams p) {
  STRATA_SHARED(float, mixed);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int blocks = p.rank / 32;
  const int jobs = p.num_streams * blocks;
  float* products = mixed + kMostRows * p.rank;
  float* terms = products + kMostRows * jobs * 32;
  Held held[kHeldBlocks] = {};
  // A pair is a block of kHeldBlocks streams' panels (the last stream again where there are too
  // few); `first` is that of warp 0.
  const int pairs = (p.num_streams + kHeldBlocks - 1) / kHeldBlocks * blocks;
  QuotientAndRest pair = {};
  const auto hold = [&](int first) {
    pair = Divided(min(first + warp, pairs - 1), blocks);
#pragma unroll
    for (int k = 0; k < kHeldBlocks; ++k) {
      const int stream = min(pair.quotient * kHeldBlocks + k, p.num_streams - 1);
      const int panel = stream * (p.width / 32) + blockIdx.x;
      Hold(UnitAt(p.up, panel, pair.rest / 8), pair.rest % 8, lane, &held[k]);
    }
  };
  const int num_rows = MixedRows(p, mixed, [&] {
    hold(0);
    WaitForKernelBefore();
    LetNextKernelBegin();
  });
  if (num_rows <= 0) return ClearDeadRows(p);
  const auto place = Divided(warp, p.num_streams);
  MixInput input = {};
  if (place.quotient < num_rows) input = LoadMixInput(p, place.quotient, place.rest);
  __syncthreads();
  for (int first = 0; first < pairs; first += kHeldUpWarps) {
    if (first > 0) hold(first);
    MultiplyHeld(held, mixed + pair.rest * 32, p.rank, num_rows, [&](int k, int r, float product) {
      const int stream = pair.quotient * kHeldBlocks + k;
      if (first + warp < pairs && stream < p.num_streams) {
        products[(r * jobs + stream * blocks + pair.rest) * 32 + lane] = product;
      }
    });
  }
  __syncthreads();
  ClearDeadRows(p);
  Mix(p, num_rows, input, terms, [&](int r, int s) {
    const float* of_blocks = products + (r * jobs + s * blocks) * 32 + lane;
    float gate = 0.0f;
    for (int segment = 0; segment < blocks; segment += 8) {
      float sum = 0.0f;
#pragma unroll
      for (int b = segment; b < segment + 8; ++b) {
        if (b < blocks) sum = __fadd_rn(sum, of_blocks[b * 32]);
      }
      gate = __fadd_rn(gate, sum);
    }
    return gate;
  });
}

unsigned Groups(int64_t num_rows, int64_t rows_of_block) {
  return static_cast<unsigned>((num_rows + rows_of_block - 1) / rows_of_block);
}

std::string LaunchDown(const HyperReadArgs& a, HyperParams p, cudaStream_t stream) {
  const auto held = [](const DeviceMatrix* m) { return m->type->type == GgmlType::kBF16; };
  const unsigned segments = static_cast<unsigned>(p.down_segments);
  const unsigned panels = static_cast<unsigned>(p.down_panels) + (p.injected ? 1 : 0);
  Shape shape;
  shape.stream = stream;
  const bool holds = held(a.down) && (!p.injected || held(a.inject));
  const unsigned panels_of_block = holds ? kHeldPanels : kDownWarps;
  shape.grid = dim3(segments, (panels + panels_of_block - 1) / panels_of_block);
  const int64_t rows = RowsOfBlock(a.num_rows, int64_t{shape.grid.x} * shape.grid.y);
  shape.grid.z = Groups(a.num_rows, rows);
  p.down_rows = static_cast<int32_t>(rows);
  if (holds) {
    shape.block = dim3(kHeldDownWarps * 32);
    return LaunchOverlapping(HyperDownHeldKernel, shape, p);
  }
  shape.block = dim3(kDownWarps * 32);
  shape.shared_bytes = GridSharedBytes(*a.down) + (p.injected ? GridSharedBytes(*a.inject) : 0);
  return LaunchOverlapping(HyperDownKernel, shape, p);
}

std::string LaunchUp(const HyperReadArgs& a, HyperParams p, cudaStream_t stream) {
  Shape shape;
  shape.stream = stream;
  const int64_t rows = RowsOfBlock(a.num_rows, p.width / 32);
  shape.grid = dim3(static_cast<unsigned>(p.width / 32), Groups(a.num_rows, rows));
  p.up_rows = static_cast<int32_t>(rows);
  const int64_t held_bytes = HeldUpBytes(p.num_streams, p.rank);
  if (p.up.type == GgmlType::kBF16 && held_bytes <= kHeldUpMostBytes) {
    shape.block = dim3(kHeldUpWarps * 32);
    shape.shared_bytes = static_cast<size_t>(held_bytes);
    return LaunchOverlapping(HyperUpHeldKernel, shape, p);
  }
  const int64_t segments = (p.rank + 255) / 256;
  shape.block = dim3(kUpWarps * 32);
  shape.shared_bytes = static_cast<size_t>(
      4 * kMostRows * (p.rank + p.num_streams * segments * 32 + p.num_streams * 32));
  if (p.up.quantised) shape.shared_bytes += QuantizedBytes(kMostRows, p.rank);
  shape.shared_bytes = (shape.shared_bytes + 15) / 16 * 16;
  p.up_grid_at = static_cast<int32_t>(shape.shared_bytes);
  shape.shared_bytes += GridSharedBytes(*a.up);
  return LaunchOverlapping(HyperUpKernel, shape, p);
}

}  // namespace

int64_t HyperReadWorkspace(int64_t num_rows, int64_t num_streams, int64_t width, int64_t rank) {
  const int64_t segments = (num_streams * width + 255) / 256;
  return std::max(num_rows * num_streams + num_rows * segments * (rank + 32),
                  HyperReadTilesWorkspace(num_rows, num_streams, rank));
}

std::string HyperRead(const HyperReadArgs& a, cudaStream_t stream) {
  const int64_t values =
      std::max(a.num_rows * a.num_streams * a.width,
               HyperReadWorkspace(a.num_rows, a.num_streams, a.width, a.down->rows));
  const int64_t bytes =
      std::max(a.down->panels() * a.down->panel_bytes, a.up->panels() * a.up->panel_bytes);
  if (std::max(values, bytes) > INT32_MAX) {
    return std::to_string(values) + " values and " + std::to_string(bytes) +
           " bytes of weights, expected at most 2^31 - 1 of either";
  }
  if (HasHyperReadTiles(a)) return HyperReadTiles(a, stream);
  HyperParams p = {};
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
  p.down_segments = static_cast<int32_t>(a.down->segments());
  p.down_panels = static_cast<int32_t>(a.down->panels());
  p.eps = a.eps;
  p.inverse_width = 1.0f / static_cast<float>(a.width);
  p.inverse_streams = 1.0f / static_cast<float>(a.num_streams);
  p.injected = a.inject != nullptr;
  p.down = ViewOf(*a.down);
  if (p.injected) p.inject = ViewOf(*a.inject);
  p.up = ViewOf(*a.up);
  const std::string error = LaunchDown(a, p, stream);
  return error.empty() ? LaunchUp(a, p, stream) : error;
}

}  // namespace strata
