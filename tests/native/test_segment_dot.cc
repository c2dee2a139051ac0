// Segment products of the CUDA library, compiled for the CPU, against the scalar kernels: bit for
// bit, for every type.

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "common/dequantize.h"
#include "common/panel.h"
#include "cuda/panels.h"
#include "cuda/segment_dot.cuh"
#include "float_bits.h"

namespace strata {
namespace {

constexpr int kMostRows = 8;
using Random = std::mt19937;

// A weight matrix in the file's order. Quantised blocks are random bytes: every code, and scales of
// every kind (NaN too, in a 32nd of the blocks). Floats are ordinary numbers and, now and then, a
// subnormal one.
std::vector<uint8_t> RandomMatrix(const TypeInfo& type, int64_t rows, int64_t cols,
                                  Random& random) {
  std::vector<uint8_t> bytes(
      static_cast<size_t>(rows * cols / type.block_values * type.block_bytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  if (type.form != Form::kFloat) return bytes;
  const size_t step = static_cast<size_t>(type.block_bytes);
  for (size_t i = 0; i < bytes.size(); i += step) {
    uint8_t* top = &bytes[i + step - 1];
    *top = static_cast<uint8_t>((*top & 0x80) | (random() % 64 == 0 ? 0x00 : 0x30 + random() % 12));
  }
  return bytes;
}

// Activation rows as SegmentDot and as the scalar kernels take them.
struct TestRows {
  int num_rows;
  int width;
  alignas(16) std::array<int8_t, kMostRows * 1024> codes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  alignas(4) std::array<int16_t, kMostRows * 64> short_sums;
  alignas(16) std::array<float, kMostRows * 1024> values;

  Rows ForDevice(const std::vector<uint32_t>& grid, int copies) const {
    return {codes.data(), scales.data(), short_sums.data(), values.data(), width,
            grid.data(),  copies};
  }
  Activations ForHost() const {
    return {codes.data(), scales.data(), sums.data(), values.data(), width, nullptr};
  }
};

float RandomScale(Random& random) {
  constexpr float kSpecial[] = {0.0f, 0x1p-140f, 0x1p-126f, 0x1.fffffep127f, -0.0f};
  switch (random() % 40) {
    case 0:
      return kSpecial[random() % 5];
    case 1:
      return random() % 4 == 0 ? FromBits(0x7fc00000u) : 1.0f;
    case 2:
      return random() % 4 == 0 ? FromBits(0x7f800000u) : 1.0f;
    default:
      return std::ldexp(1.0f + static_cast<float>(random() % 4096) / 4096.0f,
                        static_cast<int>(random() % 24) - 16);
  }
}

TestRows RandomRows(int num_rows, int width, Random& random) {
  TestRows rows = {};
  rows.num_rows = num_rows;
  rows.width = width;
  rows.scales.resize(static_cast<size_t>(num_rows * width / 32));
  rows.sums.resize(static_cast<size_t>(num_rows * width / 16));
  for (float& scale : rows.scales) scale = RandomScale(random);
  for (int i = 0; i < num_rows * width; ++i) {
    const int code = static_cast<int>(random() % 255) - 127;
    const bool extreme = i / 32 % 7 == 3;  // whole blocks of the largest codes
    const size_t at = static_cast<size_t>(i);
    rows.codes[at] = static_cast<int8_t>(extreme ? (code < 0 ? -127 : 127) : code);
    rows.values[at] = static_cast<float>(code) * RandomScale(random);
    rows.sums[at / 16] += rows.codes[at];
    rows.short_sums[at / 16] = static_cast<int16_t>(rows.sums[at / 16]);
  }
  return rows;
}

// The products as the scalar kernels compute them, [num_rows][matrix rows].
std::vector<float> HostProducts(const TypeInfo& type, const PanelShape& shape,
                                const std::vector<uint8_t>& matrix, const TestRows& rows) {
  const Kernels& kernels = ScalarKernels();
  const int64_t row_bytes = int64_t{shape.cols} / type.block_values * type.block_bytes;
  std::vector<float> y(static_cast<size_t>(rows.num_rows * shape.rows));
  for (int first = 0; first < shape.rows; first += kPanelRows) {
    const int columns = std::min(kPanelRows, shape.rows - first);
    for (int begin = 0; begin < shape.cols; begin += kSegment) {
      const int values = std::min(kSegment, shape.cols - begin);
      const uint8_t* bytes =
          matrix.data() + first * row_bytes + int64_t{begin} / type.block_values * type.block_bytes;
      const PanelOutput out = {y.data() + first, shape.rows, columns, begin == 0};
      if (type.form == Form::kFloat) {
        static FloatPanel panel;
        kernels.pack_float(type, bytes, row_bytes, columns, values, {nullptr, 0}, &panel);
        kernels.multiply_float(panel, values, rows.ForHost(), begin, rows.num_rows, out);
      } else {
        static Panel panel;
        kernels.pack(type, bytes, row_bytes, columns, values / kBlock, {nullptr, 0}, &panel);
        kernels.multiply(type, panel, values / kBlock, rows.ForHost(), begin / kBlock,
                         rows.num_rows, out);
      }
    }
  }
  return y;
}

std::vector<uint8_t> Packed(const TypeInfo& type, const PanelShape& shape,
                            const std::vector<uint8_t>& matrix) {
  std::vector<uint8_t> panels(static_cast<size_t>(shape.matrix_bytes) + 16, 0xee);
  PackPanels(type, shape, matrix.data(), 0, shape.num_panels, panels.data());
  for (size_t i = panels.size() - 16; i < panels.size(); ++i) CHECK_EQ(int{panels[i]}, 0xee);
  return panels;
}

std::vector<uint32_t> StagedGrid(const TypeInfo& type, int copies) {
  const size_t bytes = static_cast<size_t>(GridBytes(type.type, copies));
  std::vector<uint32_t> grid(bytes / 4 + 1);
  constexpr int kThreads = 96;
  for (int thread = 0; thread < kThreads; ++thread) {
    StageGrid(type.type, copies, grid.data(), thread, kThreads);
  }
  return grid;
}

int BlocksOf(const PanelShape& shape, int segment) {
  return std::min(kSegmentBlocks, shape.cols / kBlock - segment * kSegmentBlocks);
}

// Compares SegmentDot's products with the scalar kernels'.
void CheckProducts(const TypeInfo& type, int weight_rows, int cols, int num_rows, int copies,
                   Random& random) {
  const PanelShape shape = ShapeOfPanels(type, weight_rows, cols);
  const std::vector<uint8_t> matrix = RandomMatrix(type, weight_rows, cols, random);
  const std::vector<uint8_t> panels = Packed(type, shape, matrix);
  const TestRows rows = RandomRows(num_rows, cols, random);
  const std::vector<uint32_t> grid = StagedGrid(type, copies);
  const std::vector<float> expected = HostProducts(type, shape, matrix, rows);
  for (int row = 0; row < weight_rows; ++row) {
    const int lane = row % kPanelLanes;
    const uint8_t* panel = panels.data() + row / kPanelLanes * shape.panel_bytes;
    float total[kMostRows] = {};
    for (int segment = 0; segment < shape.num_segments; ++segment) {
      float acc[kMostRows + 1];
      acc[num_rows] = -7.0f;
      SegmentDot(type.type, panel + segment * shape.unit_bytes, lane, BlocksOf(shape, segment),
                 rows.ForDevice(grid, copies), segment * kSegmentBlocks, num_rows, acc);
      CHECK(acc[num_rows] == -7.0f);
      for (int r = 0; r < num_rows; ++r) total[r] += acc[r];
    }
    for (int r = 0; r < num_rows; ++r) {
      const size_t at = static_cast<size_t>(r * weight_rows + row);
      CheckSame(total[r], expected[at], type.name, "product");
    }
  }
}

// Row lengths: one whole segment, and where the type allows it a short one behind two whole ones,
// and every length of a short one.
std::vector<int> ColumnsOf(const TypeInfo& type) {
  std::vector<int> columns = {256, 1024};
  for (int cols = 32; cols < 256; cols += 32) {
    if (HasPanels(type, cols)) columns.push_back(cols);
  }
  if (HasPanels(type, 640)) columns.push_back(640);
  return columns;
}

void ItGivesTheScalarKernelsBits() {
  Random random(1);
  for (const TypeInfo& type : kTypes) {
    const int best = std::max(1, BestGridCopies(type.type));
    for (const int cols : ColumnsOf(type)) {
      for (const int num_rows : {1, 2, 3, 8}) {
        CheckProducts(type, 40, cols, num_rows, num_rows == 3 ? 1 : best, random);
      }
    }
  }
}

void ItComputesEveryScaleOfAType() {
  Random random(2);
  for (const TypeInfo& type : kTypes) {
    for (int trial = 0; trial < 8; ++trial) {
      CheckProducts(type, 64, 256, 1, 1 << trial % 6, random);
    }
  }
}

void ItUnpacksWhatItPacked() {
  Random random(3);
  for (const TypeInfo& type : kTypes) {
    for (const int cols : ColumnsOf(type)) {
      const PanelShape shape = ShapeOfPanels(type, 70, cols);
      const std::vector<uint8_t> matrix = RandomMatrix(type, 70, cols, random);
      const std::vector<uint8_t> panels = Packed(type, shape, matrix);
      std::vector<uint8_t> again(matrix.size());
      // Panel by panel, the last first: they are independent.
      for (int panel = shape.num_panels - 1; panel >= 0; --panel) {
        UnpackPanels(type, shape, panels.data() + panel * shape.panel_bytes, panel, 1,
                     again.data());
      }
      CHECK(again == matrix);
    }
  }
}

void ItReadsValuesByFours() {
  Random random(4);
  for (const TypeInfo& type : kTypes) {
    for (const int cols : ColumnsOf(type)) {
      const PanelShape shape = ShapeOfPanels(type, 33, cols);
      const std::vector<uint8_t> bytes = RandomMatrix(type, 33, cols, random);
      const std::vector<uint8_t> panels = Packed(type, shape, bytes);
      const Matrix matrix = {bytes.data(), &type, 1, 33, cols, 33};
      std::vector<float> expected(static_cast<size_t>(cols));
      for (const int row : {0, 31, 32}) {
        DequantizeRow(matrix, row, expected.data());
        for (int i = 0; i < cols; i += 4) {
          const uint8_t* unit =
              panels.data() + row / 32 * shape.panel_bytes + i / 256 * shape.unit_bytes;
          const float4 got =
              FourOfSegment(type.type, unit, row % 32, BlocksOf(shape, i / 256), i % 256 / 4);
          const float values[] = {got.x, got.y, got.z, got.w};
          for (int place = 0; place < 4; ++place) {
            CheckSame(values[place], expected[static_cast<size_t>(i + place)], type.name, "value");
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(ItGivesTheScalarKernelsBits);
  RUN(ItComputesEveryScaleOfAType);
  RUN(ItUnpacksWhatItPacked);
  RUN(ItReadsValuesByFours);
  return 0;
}
