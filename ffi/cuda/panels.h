// The layout of matrices in a GPU's memory: GGUF blocks, permuted so that a warp's loads are
// contiguous.
//
// A panel is 32 rows; lane l of a warp works on row l. A row is cut into segments of 256 values
// (contract T of numerics.md; the last may have 32 to 224). A unit is one segment of one panel:
//   unit   floor(B / 16) chunks of [lane][16 bytes], then the rest in words of [lane][4 bytes],
//          where B = SegmentBytes, the segment's bytes padded to whole words
//   panel  its units, segment by segment; matrix: its panels; experts: one matrix after the other
// Lanes past the last row hold zeros. Everything starts on a multiple of 128 bytes.
//
// Within the segment the bits of some types are rearranged (arrange.h). All of it is a permutation:
// UnpackPanels gives the file's bytes back.
#pragma once

#include <cstdint>

#include "common/gguf_types.h"

namespace strata {

inline constexpr int kPanelLanes = 32;
inline constexpr int kPanelAlignment = 128;

// Where things lie in one matrix [rows, cols]; kernels take it by value. Unit (panel, segment)
// begins at panel * panel_bytes + segment * unit_bytes.
struct PanelShape {
  int32_t rows;
  int32_t cols;
  int32_t num_panels;
  int32_t num_segments;
  int64_t unit_bytes;  // of a whole segment
  int64_t panel_bytes;
  int64_t matrix_bytes;
};

// Bytes of one row's segment of `values` values (32..256 in steps of the type's block).
constexpr int SegmentBytes(const TypeInfo& type, int values) {
  return (values / type.block_values * type.block_bytes + 3) / 4 * 4;
}

// Whether matrices of that type and row length can be laid out in panels.
constexpr bool HasPanels(const TypeInfo& type, int64_t cols) {
  return cols > 0 && cols % 32 == 0 && cols % type.block_values == 0;
}

PanelShape ShapeOfPanels(const TypeInfo& type, int64_t rows, int64_t cols);

// Panels [first, first + count) of one matrix. `matrix` is its first byte in the file's order,
// `panels` where panel `first` goes. Threads may pack different panels at once.
void PackPanels(const TypeInfo& type, const PanelShape& shape, const uint8_t* matrix, int64_t first,
                int64_t count, uint8_t* panels);

// The inverse: writes the rows of those panels into `matrix`.
void UnpackPanels(const TypeInfo& type, const PanelShape& shape, const uint8_t* panels,
                  int64_t first, int64_t count, uint8_t* matrix);

}  // namespace strata
