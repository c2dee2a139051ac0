// Products of activation rows with panels: what every op that multiplies shares.
//
// A panel is 32 rows of a matrix; a lane owns one of them and never exchanges a sum with another,
// so the order of contract T (blocks within a segment, then segments) needs no shuffles. A warp
// takes whole segments; a block adds its warps' segments in ascending order. Where a matrix has too
// few panels to fill the card its segments are spread over several blocks, which leave their sums
// in `workspace`; the block that arrives last adds them, in the same order. So the number of blocks
// never shows in a result.
#pragma once

#include "cuda/activations.cuh"
#include "cuda/device_store.h"
#include "cuda/launch.h"
#include "cuda/segment_dot.cuh"

namespace strata {

// What a kernel needs of a DeviceMatrix.
struct PanelMatrix {
  const uint8_t* bytes;
  int64_t panel_bytes;
  int32_t unit_bytes;
  int32_t rows;
  int32_t cols;
  GgmlType type;
  bool quantised;
};

inline PanelMatrix ViewOf(const DeviceMatrix& m) {
  return {m.bytes,
          m.panel_bytes,
          static_cast<int32_t>(m.unit_bytes),
          static_cast<int32_t>(m.rows),
          static_cast<int32_t>(m.cols),
          m.type->type,
          m.quantised()};
}

__device__ __forceinline__ int NumSegments(const PanelMatrix& m) { return (m.cols + 255) / 256; }

// Copies of a type's code book that blocks stage in shared memory: more cost more to write than
// their fewer bank conflicts give back to a block that uses them for some units only.
__host__ __device__ constexpr int GridCopies(GgmlType type) {
  const int best = BestGridCopies(type);
  return best < 8 ? best : 8;
}

inline size_t GridSharedBytes(const DeviceMatrix& m) {
  return static_cast<size_t>(GridBytes(m.type->type, GridCopies(m.type->type)));
}

// The code book of `type` in `at` (16-byte aligned, GridBytes bytes), by the whole block; the
// caller synchronises. Returns the copies for Rows::grid_copies.
__device__ __forceinline__ int StageGridOf(GgmlType type, unsigned char* at) {
  const int copies = GridCopies(type);
  if (copies > 0) {
    StageGrid(type, copies, reinterpret_cast<uint32_t*>(at), threadIdx.x, blockDim.x);
  }
  return copies;
}

// Asks for a unit's bytes ahead of their use: weights depend on nothing that runs before.
__device__ __forceinline__ void PrefetchUnit(const uint8_t* unit, int unit_bytes, int lane) {
#if !defined(STRATA_EMULATE)
  for (int at = lane * 128; at < unit_bytes; at += 32 * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(unit + at));
  }
#else
  (void)unit, (void)unit_bytes, (void)lane;
#endif
}

// The same by one instruction where there is one, which takes every byte and none past the last: it
// must lie in memory of this device. `bytes` is a multiple of 16.
__device__ __forceinline__ void PrefetchOwn(const uint8_t* at, int bytes, int lane) {
#if !defined(STRATA_EMULATE) && __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
  }
#else
  PrefetchUnit(at, bytes, lane);
#endif
}

// sums[r] <- the sum of one segment for the lane's row of `panel` and activation rows r.
__device__ __forceinline__ void MultiplySegment(const PanelMatrix& m, const uint8_t* bytes,
                                                int panel, int segment, const Rows& rows,
                                                int num_rows, int lane, float* sums) {
  const int first_block = segment * 8;
  const int blocks = min(8, m.cols / 32 - first_block);
  if (panel * 32 + lane < m.rows) {
    const uint8_t* unit =
        bytes + panel * m.panel_bytes + static_cast<int64_t>(segment) * m.unit_bytes;
    SegmentDot(m.type, unit, lane, blocks, rows, first_block, num_rows, sums);
  }
}

}  // namespace strata
