// The products of expert_ffn_tiles.cu by wide tiles (wide_products.cuh): an expert's weights are
// decoded once or twice for a whole chunk.
#pragma once

#include <limits>
#include <string>

#include "cuda/group_units.h"
#include "cuda/ops/expert_ffn_tiles.cuh"
#include "cuda/wide_products.cuh"

namespace strata::expert_tiles {

static_assert(kWideRows == wide::kMostRows && kColumns == wide::kColumns);

// The types of a product's kernels: with groups of 32 values, for others need two sums for a block.
template <typename Product, typename... Decodes>
struct WideTypes {
  // A place among the activation values is kept in 32 bits (wide::RowCopies).
  static bool Have(const PanelMatrix& m, int64_t values) {
    return ((m.type == Decodes::kType) || ...) && HasGroupUnits() && m.cols % 128 == 0 &&
           values <= std::numeric_limits<int32_t>::max();
  }
  static std::string Launch(const TileParams& p, cudaStream_t stream) {
    std::string error = "a type without wide tiles";
    (LaunchFor<Decodes>(p, stream, &error), ...);
    return error;
  }

 private:
  template <typename Decode>
  static void LaunchFor(const TileParams& p, cudaStream_t stream, std::string* error) {
    if (p.first.type == Decode::kType) *error = wide::LaunchTiles<Decode, Product>(p, stream);
  }
};

// What both products share: those of one tile of entries are taken by blocks next to each other,
// which read the same rows. The devices that other passes of the compiler are for have none of it.
struct WideTiles {
  using Params = TileParams;
#if STRATA_GROUPS
  struct Work : TileWork {
    int column;  // of the launch's, in steps of kColumns or of kHidden
  };

  __device__ __forceinline__ static int NumEntryTiles(const TileParams& p) {
    if (p.experts == nullptr) {
      return (LiveRows(*p.live, p.num_rows) + kWideRows - 1) / kWideRows;
    }
    return *p.end_tile - (p.first_tile != nullptr ? *p.first_tile : 0);
  }
  __device__ __forceinline__ static Work FindAt(const TileParams& p, int tile, int column) {
    return {FindWork(p, tile, kWideRows), column};
  }
  __device__ __forceinline__ static const QuantizedRows& Rows(const TileParams& p) { return p.in; }
  __device__ __forceinline__ static int Cols(const TileParams& p) { return p.first.cols; }
  // Where the tile's entries begin among all, the shared expert's behind the routed ones'.
  __device__ __forceinline__ static int64_t FirstOf(const TileParams& p, const Work& work) {
    return (p.experts != nullptr ? 0 : p.shared_first) + work.first;
  }
#endif
};

struct WideGateUp : WideTiles {
#if STRATA_GROUPS
  __device__ __forceinline__ static int Columns(const TileParams& p) {
    return static_cast<int>(p.out.values) / kHidden;
  }
  __device__ __forceinline__ static int NumTiles(const TileParams& p) {
    return NumEntryTiles(p) * Columns(p);
  }
  __device__ __forceinline__ static Work Find(const TileParams& p, int i) {
    return FindAt(p, i / Columns(p), i % Columns(p));
  }
  __device__ __forceinline__ static int64_t RowOf(const TileParams& p, const Work& work, int i) {
    return p.experts != nullptr ? p.groups.order[work.first + i] / p.num_active : work.first + i;
  }
  // Gate's columns are the first 64.
  __device__ __forceinline__ static wide::Panel PanelOf(const TileParams& p, const Work& work,
                                                        int i) {
    constexpr int kPanels = kHidden / 32;
    const bool is_up = i >= kPanels;
    const PanelMatrix& m = is_up ? p.second : p.first;
    const uint8_t* bytes = work.bytes + (is_up ? p.second_at : p.first_at);
    return {m, p.experts != nullptr ? bytes : m.bytes, work.column * kPanels + i % kPanels};
  }
  __device__ __forceinline__ static void Write(const TileParams& p, const Work& work,
                                               const float* totals, int line) {
    const int first = work.column * kHidden;
    const auto hidden = [&](int row, int at) {
      float4 h = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first + at >= p.first.rows) return h;
      const float4 gate = *reinterpret_cast<const float4*>(totals + row * line + at);
      const float4 up = *reinterpret_cast<const float4*>(totals + row * line + kHidden + at);
      h.x = SiluMul(gate.x, up.x), h.y = SiluMul(gate.y, up.y);
      h.z = SiluMul(gate.z, up.z), h.w = SiluMul(gate.w, up.w);
      return h;
    };
    WriteHidden(hidden, p.out, FirstOf(p, work), work.count, first);
  }
#endif
};

struct WideDown : WideTiles {
#if STRATA_GROUPS
  __device__ __forceinline__ static int Columns(const TileParams& p) {
    return (p.slice + kColumns - 1) / kColumns;
  }
  __device__ __forceinline__ static int NumTiles(const TileParams& p) {
    return NumEntryTiles(p) * Columns(p);
  }
  __device__ __forceinline__ static Work Find(const TileParams& p, int i) {
    return FindAt(p, i / Columns(p), i % Columns(p));
  }
  __device__ __forceinline__ static int64_t RowOf(const TileParams& p, const Work& work, int i) {
    return FirstOf(p, work) + i;
  }
  __device__ __forceinline__ static wide::Panel PanelOf(const TileParams& p, const Work& work,
                                                        int i) {
    const uint8_t* bytes = p.experts != nullptr ? work.bytes + p.first_at : p.first.bytes;
    return {p.first, bytes, p.first_column / 32 + work.column * (kColumns / 32) + i};
  }
  // The experts' rows, not weighted: a warp writes a row's 128 columns.
  __device__ __forceinline__ static void Write(const TileParams& p, const Work& work,
                                               const float* totals, int line) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = static_cast<int>(threadIdx.x) / 32;
    // Where the warp's rows go, one a lane: asked for together.
    static_assert(kWideRows <= 32 * kWarps);
    int entry = static_cast<int>(FirstOf(p, work)) + first + lane * kWarps;
    if (p.experts != nullptr && first + lane * kWarps < work.count) entry = p.groups.order[entry];
    const int at = work.column * kColumns + lane * 4;
    const bool exists = p.first_column + at < p.first.rows;
    for (int i = 0; first + i * kWarps < work.count; ++i) {
      const int64_t to = __shfl_sync(kAllLanes, entry, i);
      if (!exists) continue;
      *reinterpret_cast<float4*>(p.sums + to * p.slice + at) =
          *reinterpret_cast<const float4*>(totals + (first + i * kWarps) * line + at % kColumns);
    }
  }
#endif
};

}  // namespace strata::expert_tiles
