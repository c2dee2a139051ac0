#include "cuda/panels.h"

#include <algorithm>
#include <cstring>

#include "cuda/arrange.h"

namespace strata {
namespace {

constexpr int kSegmentValues = 256;
constexpr int kMostSegmentBytes = 4 * kSegmentValues;  // float32

// Calls copy(offset in the segment, address in the unit, bytes) for each piece of a lane.
template <typename Byte, typename Copy>
void ForEachPiece(Byte* unit, int lane, int segment_bytes, const Copy& copy) {
  const int chunks = segment_bytes / 16;
  for (int c = 0; c < chunks; ++c) copy(16 * c, unit + (c * kPanelLanes + lane) * 16, 16);
  Byte* rest = unit + chunks * kPanelLanes * 16;
  for (int i = 0; i < segment_bytes % 16 / 4; ++i) {
    copy(16 * chunks + 4 * i, rest + (i * kPanelLanes + lane) * 4, 4);
  }
}

// Calls visit(row's segment in the file's order, unit, lane, segment) for each row of the panels;
// the first is null for lanes past the last row.
template <typename Stored, typename Packed, typename Visit>
void ForEachSegment(const TypeInfo& type, const PanelShape& shape, Stored* matrix, int64_t first,
                    int64_t count, Packed* panels, const Visit& visit) {
  const int64_t row_bytes = int64_t{shape.cols} / type.block_values * type.block_bytes;
  const int64_t stride = int64_t{kSegmentValues} / type.block_values * type.block_bytes;
  for (int64_t panel = 0; panel < count; ++panel) {
    for (int segment = 0; segment < shape.num_segments; ++segment) {
      Packed* unit = panels + panel * shape.panel_bytes + segment * shape.unit_bytes;
      for (int lane = 0; lane < kPanelLanes; ++lane) {
        const int64_t row = (first + panel) * kPanelLanes + lane;
        Stored* stored = nullptr;
        if (row < shape.rows) stored = matrix + row * row_bytes + segment * stride;
        visit(stored, unit, lane, segment);
      }
    }
  }
}

int ValuesOf(const PanelShape& shape, int segment) {
  return std::min(kSegmentValues, shape.cols - segment * kSegmentValues);
}

}  // namespace

PanelShape ShapeOfPanels(const TypeInfo& type, int64_t rows, int64_t cols) {
  PanelShape shape = {};
  shape.rows = static_cast<int32_t>(rows);
  shape.cols = static_cast<int32_t>(cols);
  shape.num_panels = static_cast<int32_t>((rows + kPanelLanes - 1) / kPanelLanes);
  shape.num_segments = static_cast<int32_t>((cols + kSegmentValues - 1) / kSegmentValues);
  shape.unit_bytes = int64_t{kPanelLanes} * SegmentBytes(type, kSegmentValues);
  const int last = ValuesOf(shape, shape.num_segments - 1);
  shape.panel_bytes =
      (shape.num_segments - 1) * shape.unit_bytes + int64_t{kPanelLanes} * SegmentBytes(type, last);
  shape.matrix_bytes = shape.num_panels * shape.panel_bytes;
  return shape;
}

void PackPanels(const TypeInfo& type, const PanelShape& shape, const uint8_t* matrix, int64_t first,
                int64_t count, uint8_t* panels) {
  const auto pack = [&](const uint8_t* stored, uint8_t* unit, int lane, int segment) {
    const int values = ValuesOf(shape, segment);
    const int num_bytes = values / type.block_values * type.block_bytes;
    uint8_t bytes[kMostSegmentBytes];
    const int segment_bytes = SegmentBytes(type, values);
    std::memset(bytes + segment_bytes - 4, 0, 4);  // the padding
    if (stored != nullptr) {
      ArrangeSegment(type.type, type.block_bytes, stored, num_bytes, bytes);
    } else {
      std::memset(bytes, 0, static_cast<size_t>(segment_bytes));
    }
    ForEachPiece(unit, lane, segment_bytes, [&](int offset, uint8_t* place, int size) {
      std::memcpy(place, bytes + offset, static_cast<size_t>(size));
    });
  };
  ForEachSegment(type, shape, matrix, first, count, panels, pack);
}

void UnpackPanels(const TypeInfo& type, const PanelShape& shape, const uint8_t* panels,
                  int64_t first, int64_t count, uint8_t* matrix) {
  const auto unpack = [&](uint8_t* stored, const uint8_t* unit, int lane, int segment) {
    if (stored == nullptr) return;
    const int values = ValuesOf(shape, segment);
    uint8_t bytes[kMostSegmentBytes];
    ForEachPiece(unit, lane, SegmentBytes(type, values),
                 [&](int offset, const uint8_t* place, int size) {
                   std::memcpy(bytes + offset, place, static_cast<size_t>(size));
                 });
    RestoreSegment(type.type, type.block_bytes, bytes,
                   values / type.block_values * type.block_bytes, stored);
  };
  ForEachSegment(type, shape, matrix, first, count, panels, unpack);
}

}  // namespace strata
