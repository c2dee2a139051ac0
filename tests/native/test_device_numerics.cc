// Quantisation and SiLU of the CUDA library, emulated on the CPU, against the scalar kernels: bit
// for bit. And which products have wide tiles.

#include <random>
#include <vector>

#include "common/panel.h"
#include "cuda/numerics.cuh"
#include "cuda/ops/expert_wide_tiles.h"
#include "float_bits.h"

namespace strata {
namespace {

using Random = std::mt19937;

// Blocks of activations of every kind.
std::vector<float> QuantisableBlocks(int num_blocks, Random& random) {
  std::vector<float> x(static_cast<size_t>(num_blocks) * 32);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t block = i / 32;
    const int exponent = block % 8 == 7 ? -100 : static_cast<int>(random() % 12) - 6;
    const float value = std::ldexp(static_cast<float>(random() % 8192) - 4096.0f, exponent - 12);
    x[i] = block % 8 == 6 ? 0.0f : value;
  }
  x[3] = FromBits(0x7fc00001u);
  x[32 + 17] = FromBits(0xff800000u);
  x[64 + 31] = FromBits(0x7f7fffffu);
  x[96] = 0x1p-149f;
  for (size_t i = 128; i < 160; ++i) x[i] = i % 2 ? 0.5f : -1.5f;  // ties of the rounding
  x[128] = 127.0f;
  return x;
}

struct QuantizeResult {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

void QuantizeByLanes(const float* x, QuantizeResult* to) {
  const int lane = static_cast<int>(threadIdx.x);
  const size_t block = blockIdx.x;
  const QuantizedLane q = QuantizeLane(x[block * 32 + static_cast<size_t>(lane)]);
  to->codes[block * 32 + static_cast<size_t>(lane)] = static_cast<int8_t>(q.code);
  to->scales[block] = q.scale;
  to->sums[block * 2 + static_cast<size_t>(lane) / 16] = q.half_sum;
}

void QuantizeByQuads(const float* x, QuantizeResult* to) {
  const size_t first = blockIdx.x * 128 + threadIdx.x * 4;
  const QuantizedQuad q =
      QuantizeQuad(make_float4(x[first], x[first + 1], x[first + 2], x[first + 3]));
  std::memcpy(&to->codes[first], &q.codes, 4);
  to->scales[first / 32] = q.scale;
  to->sums[first / 16] = q.half_sum;
}

void ItQuantisesAsTheScalarKernels() {
  Random random(5);
  constexpr int kBlocks = 512;
  const std::vector<float> x = QuantisableBlocks(kBlocks, random);
  const QuantizeResult empty = {std::vector<int8_t>(kBlocks * 32), std::vector<float>(kBlocks),
                                std::vector<int32_t>(kBlocks * 2)};
  QuantizeResult expected = empty, lanes = empty, quads = empty, thread = empty;
  ScalarKernels().quantize(x.data(), kBlocks * 32, expected.codes.data(), expected.scales.data(),
                           expected.sums.data());
  CHECK_EQ(Launch(QuantizeByLanes, {dim3(kBlocks), dim3(32)}, x.data(), &lanes), std::string());
  CHECK_EQ(Launch(QuantizeByQuads, {dim3(kBlocks / 4), dim3(32)}, x.data(), &quads), std::string());
  for (size_t b = 0; b < kBlocks; ++b) {
    QuantizeBlock(&x[b * 32], &thread.codes[b * 32], &thread.scales[b]);
    for (const QuantizeResult* result : {&lanes, &quads, &thread}) {
      CheckSame(result->scales[b], expected.scales[b], "activation", "scale");
    }
  }
  for (const QuantizeResult* result : {&lanes, &quads, &thread}) {
    CHECK(result->codes == expected.codes);
  }
  CHECK(lanes.sums == expected.sums);
  CHECK(quads.sums == expected.sums);
}

void ItComputesSiluAsTheScalarKernels() {
  Random random(6);
  for (int i = 0; i < 200000; ++i) {
    // Every bit pattern for some, gates of ordinary size for the others.
    const float gate = i % 4 == 0 ? FromBits(static_cast<uint32_t>(random()))
                                  : (static_cast<float>(random() % 400000) - 200000.0f) / 1000.0f;
    const float up = FromBits(static_cast<uint32_t>(random()));
    float expected;
    ScalarKernels().silu_mul(&gate, &up, 1, &expected);
    CheckSame(SiluMul(gate, up), expected, "SiLU", "value");
  }
}

// Where a row begins among all activation rows is kept in 32 bits.
void ItHasWideTilesWhere32BitsCountAllValues() {
  using expert_tiles::HasWideDown;
  using expert_tiles::HasWideGateUp;
  PanelMatrix m = {};
  m.rows = m.cols = 640;
  m.type = GgmlType::kQ8_0;
  constexpr int64_t kMost = 0x7fffffff;
  CHECK(!HasWideDown(m, kMost) && !HasWideGateUp(m, m, kMost));
  emulate::SetCapability(9);
  CHECK(HasWideDown(m, kMost) && HasWideGateUp(m, m, kMost));
  CHECK(!HasWideDown(m, kMost + 1) && !HasWideGateUp(m, m, kMost + 1));
  m.cols = 96;
  CHECK(!HasWideDown(m, 1) && !HasWideGateUp(m, m, 1));
  m.cols = 256, m.type = GgmlType::kQ6_K;
  CHECK(!HasWideDown(m, 1) && !HasWideGateUp(m, m, 1));
  emulate::SetCapability(8);
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(ItQuantisesAsTheScalarKernels);
  RUN(ItComputesSiluAsTheScalarKernels);
  RUN(ItHasWideTilesWhere32BitsCountAllValues);
  return 0;
}
