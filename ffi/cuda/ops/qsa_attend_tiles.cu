#include <cmath>

#include "cuda/ops/qsa_attend_tiles.cuh"
#include "cuda/ops/qsa_attend_tiles.h"
#include "cuda/ops/qsa_parts.cuh"
#include "cuda/tile_rows.h"

namespace strata {
namespace attend_tiles {
namespace {

constexpr int kWarps = 4;  // rows of a thread block

// A row's list of cells, in units; a lane knows one cell of a unit.
struct CellList {
  const int32_t* blocks;
  int listed;   // blocks
  int count;    // cells
  int visible;  // cells the row sees
};

// By all lanes of a warp.
__device__ __forceinline__ CellList ListOf(const QsaAttendArgs& a, int t, bool live, int lane) {
  const int visible = min(*a.pos + t + 1, a.num_cells);
  const int32_t* blocks = a.blocks + static_cast<int64_t>(t) * a.num_blocks;
  int listed = 0;
  if (live) {
#pragma unroll 8
    for (int i = lane; i < a.num_blocks; i += 32) listed += blocks[i] >= 0;
  }
  listed = WarpSum(listed);
  return {blocks, listed, live ? listed * a.ratio + visible % a.ratio : 0, visible};
}

// The cell at `index`, -1 past the end. A block that the row does not see is left out, so that no
// foreign memory is read.
__device__ __forceinline__ int CellAt(const QsaAttendArgs& a, const CellList& list, int index) {
  if (index >= list.count) return -1;
  const int place = index / a.ratio;
  const int block = place < list.listed ? list.blocks[place] : list.visible / a.ratio;
  const int64_t cell = static_cast<int64_t>(block) * a.ratio + index % a.ratio;
  return cell < list.visible ? static_cast<int>(cell) : -1;
}

// A warp's shared memory: slots for keys and values in turn, then scales of as many units as are
// under way.
template <typename Stored>
struct Ring {
  using F = Form<Stored>;
  static constexpr int kSlotBytes = kUnit * F::kRowBytes;
  static constexpr int kAhead = (F::kSlots - 1) / 2;  // units
  static constexpr int kBytes =
      F::kSlots * kSlotBytes + (kAhead + 1) * F::kScaleFloats * static_cast<int>(sizeof(float));

  uint8_t* bytes;
  int slot;    // that is read next
  int filled;  // that is filled next
  int scales, filled_scales;

  __device__ __forceinline__ uint8_t* Slot(int index) const { return bytes + index * kSlotBytes; }
  __device__ __forceinline__ float* Scales(int index) const {
    return reinterpret_cast<float*>(bytes + F::kSlots * kSlotBytes) + index * F::kScaleFloats;
  }
};

// Starts the copies of a unit's rows, whose cells the lanes 0 to 15 hold, -1 for zeros.
template <typename Stored>
__device__ __forceinline__ void CopyUnit(const QsaAttendArgs& a, const void* cells, int kv_head,
                                         int cell, int lane, uint8_t* slot) {
  constexpr int kRowBytes = Form<Stored>::kRowBytes, kChunks = kRowBytes / 16;
  constexpr int kRows = 32 / kChunks;  // that the lanes copy at once
#pragma unroll
  for (int i = 0; i < kUnit / kRows; ++i) {
    const int row = kRows * i + lane / kChunks, chunk = lane % kChunks;
    const int of = __shfl_sync(kAllLanes, cell, row);
    const int64_t head = static_cast<int64_t>(of) * a.num_kv_heads + kv_head;
    const uint8_t* from = static_cast<const uint8_t*>(cells) + head * kRowBytes + 16 * chunk;
    CopyAsync(slot + row * kRowBytes + (chunk ^ (row & 7)) * 16, from, of >= 0);
  }
}

// The scales of a unit's keys and values: 32 bytes a cell.
__device__ __forceinline__ void CopyScales(const QsaAttendArgs& a, int kv_head, int cell, int lane,
                                           float* to) {
  const int of = __shfl_sync(kAllLanes, cell, lane / 2);
  const int64_t head = static_cast<int64_t>(of) * a.num_kv_heads + kv_head;
  CopyAsync(to + 4 * lane, a.cells.scales + head * 2 * kGroups + lane % 2 * 4, of >= 0);
}

// A row's running maximum and sum of weights, for heads g and g + 8; the sums are a lane's share.
struct Running {
  float top[2];
  float total[2];
};

// Scores of a unit to weights below the maximum so far; `valid` has a bit for each cell. Sums so
// far are brought down to a new maximum.
__device__ __forceinline__ void Softmax(unsigned valid, float scale, Scores& x, Running& running,
                                        Sums& sums) {
  const int t = threadIdx.x % 4;
  float rescale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = running.top[half];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = x[i / 2][2 * half + i % 2];
      score = valid >> (8 * (i / 2) + 2 * t + i % 2) & 1 ? score * scale : -INFINITY;
      top = fmaxf(top, score);
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    rescale[half] = running.top[half] == top ? 1.0f : exp2f(running.top[half] - top);
    running.top[half] = top;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& weight = x[i / 2][2 * half + i % 2];
      weight = weight == -INFINITY ? 0.0f : exp2f(weight - top);
      total += weight;
    }
    running.total[half] = __fmaf_rn(running.total[half], rescale[half], total);
  }
  // Multiplying by one changes nothing, so a warp may leave it out.
  if (!__any_sync(kAllLanes, (rescale[0] != 1.0f) | (rescale[1] != 1.0f))) return;
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    sums[i][0] *= rescale[0], sums[i][1] *= rescale[0];
    sums[i][2] *= rescale[1], sums[i][3] *= rescale[1];
  }
}

template <typename Stored>
__device__ __forceinline__ void LoadQueries(const float* q, int heads, Queries& to) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = g + i % 2 * 8;
      const float2 x = head < heads ? __ldg(reinterpret_cast<const float2*>(
                                          q + head * kDim + Form<Stored>::Channel(step, t, i / 2)))
                                    : make_float2(0.0f, 0.0f);
      to[step][i] = PackF16(x.x, x.y);
    }
  }
}

// out <- sums over the weights' total, gated, or zeros.
template <typename Stored>
__device__ __forceinline__ void WriteRow(const QsaAttendArgs& a, int64_t t, bool live,
                                         int first_head, int heads, const Running& running,
                                         const Sums& sums) {
  const int g = threadIdx.x % 32 / 4, lane_t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = running.total[half];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (g + 8 * half >= heads) continue;
    const float inverse = 1.0f / total;
    const int64_t head = first_head + g + 8 * half;
    const float* gate = a.proj + t * a.proj_stride + (2 * head + 1) * kDim;
    float* out = a.out + (t * a.num_heads + head) * kDim;
#pragma unroll
    for (int pair = 0; pair < kDim / 8; ++pair) {
      const int channel = Form<Stored>::OutChannel(pair, lane_t);
      float2 y = make_float2(0.0f, 0.0f);
      if (live) {
        const float2 of = __ldg(reinterpret_cast<const float2*>(gate + channel));
        const float2 x = Form<Stored>::Out(sums, pair, half);
        y = make_float2(x.x * inverse * Sigmoid(of.x), x.y * inverse * Sigmoid(of.y));
      }
      *reinterpret_cast<float2*>(out + channel) = y;
    }
  }
}

// Grid: kWarps rows each, key heads.
template <typename Stored>
__global__ void __launch_bounds__(32 * kWarps, 2)
    AttendTilesKernel(const __grid_constant__ QsaAttendArgs a) {
  STRATA_SHARED(uint8_t, shared);
  using R = Ring<Stored>;
  using F = Form<Stored>;
  constexpr int kAhead = R::kAhead;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int t = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (t >= a.num_rows) return;
  const int heads = a.num_heads / a.num_kv_heads, kv_head = blockIdx.y;
  const bool live = t < LiveRows(*a.live, a.num_rows);
  const CellList list = ListOf(a, t, live, lane);
  const int units = (list.count + kUnit - 1) / kUnit;
  R ring = {shared + warp * R::kBytes, 0, 0, 0, 0};
  // cells and valid[0] belong to the unit that is copied next, valid[kAhead] to that in hand.
  int cells = -1;
  unsigned valid[kAhead + 1] = {};
  int next_cells = CellAt(a, list, lane % kUnit);
  const auto copy_keys = [&](int unit) {
    cells = next_cells;
    next_cells = CellAt(a, list, (unit + 1) * kUnit + lane % kUnit);
#pragma unroll
    for (int i = kAhead; i > 0; --i) valid[i] = valid[i - 1];
    valid[0] = __ballot_sync(kAllLanes, cells >= 0);
    if (unit < units) {
      CopyUnit<Stored>(a, a.cells.keys, kv_head, cells, lane, ring.Slot(ring.filled));
      if (F::kScaleFloats > 0) {
        CopyScales(a, kv_head, cells, lane, ring.Scales(ring.filled_scales));
      }
    }
    ring.filled = ring.filled + 1 == F::kSlots ? 0 : ring.filled + 1;
    ring.filled_scales = ring.filled_scales == kAhead ? 0 : ring.filled_scales + 1;
    EndCopyGroup();
  };
  const auto copy_values = [&](int unit) {
    if (unit < units) {
      CopyUnit<Stored>(a, a.cells.values, kv_head, cells, lane, ring.Slot(ring.filled));
    }
    ring.filled = ring.filled + 1 == F::kSlots ? 0 : ring.filled + 1;
    EndCopyGroup();
  };
  // The slot in hand has arrived for every lane, and the one before has been read by all.
  const auto arrive = [&] {
    WaitForGroups<F::kSlots - 2>();
    __syncwarp();
  };
#pragma unroll
  for (int unit = 0; unit < kAhead; ++unit) {
    copy_keys(unit);
    copy_values(unit);
  }
  Queries q;
  LoadQueries<Stored>(a.q + (static_cast<int64_t>(t) * a.num_heads + kv_head * heads) * kDim,
                      live ? heads : 0, q);
  const float scale = 1.44269504f / sqrtf(static_cast<float>(kDim));
  Running running = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  Sums sums = {};
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    arrive();
    copy_keys(unit + kAhead);
    Scores scores = {};
    const float* scales = ring.Scales(ring.scales);
    F::Score(q, ring.Slot(ring.slot), scales, scores);
    ring.slot = ring.slot + 1 == F::kSlots ? 0 : ring.slot + 1;
    Softmax(valid[kAhead], scale, scores, running, sums);
    arrive();
    copy_values(unit + kAhead);
    F::Add(scores, ring.Slot(ring.slot), scales, sums);
    ring.slot = ring.slot + 1 == F::kSlots ? 0 : ring.slot + 1;
    ring.scales = ring.scales == kAhead ? 0 : ring.scales + 1;
  }
  WaitForCopies();
  WriteRow<Stored>(a, t, live, kv_head * heads, heads, running, sums);
}

template <typename Stored>
std::string Attend(const QsaAttendArgs& args, cudaStream_t stream) {
  Shape shape;
  shape.grid = dim3(static_cast<unsigned>((args.num_rows + kWarps - 1) / kWarps),
                    static_cast<unsigned>(args.num_kv_heads));
  shape.block = dim3(32 * kWarps);
  shape.shared_bytes = kWarps * Ring<Stored>::kBytes;
  shape.stream = stream;
  return Launch(AttendTilesKernel<Stored>, shape, args);
}

}  // namespace
}  // namespace attend_tiles

bool QsaAttendTilesApply(const QsaAttendArgs& args) {
  return args.num_rows > kMostWindowRows && args.cells.type != CellType::kFloat32 &&
         args.head_dim == attend_tiles::kDim && args.ratio > 0 &&
         args.num_heads <= attend_tiles::kHeadRows * args.num_kv_heads;
}

std::string QsaAttendTiles(const QsaAttendArgs& args, cudaStream_t stream) {
  return args.cells.type == CellType::kFloat16 ? attend_tiles::Attend<Float16Cells>(args, stream)
                                               : attend_tiles::Attend<Int8Cells>(args, stream);
}

}  // namespace strata
