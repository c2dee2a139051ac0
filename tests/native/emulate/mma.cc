#include "emulate/mma.h"

#include <array>
#include <cstring>

#include "emulate/block.h"
#include "emulate/cuda.h"

namespace emulate {
namespace {

constexpr int kLanes = 32;

// What the lanes of a warp show each other. Two sets in turn: a lane that is ahead writes into the
// other one, and cannot be ahead by two, because it waits for all lanes each time.
struct Operands {
  uint32_t a[4];
  uint32_t b[2];
  const uint8_t* row;
};

struct WarpOperands {
  std::array<std::array<Operands, kLanes>, 2> sets;
  std::array<unsigned, kLanes> calls = {};
};

std::array<WarpOperands, kMostThreads / kLanes> warps;

// Shows `mine` to the warp's other lanes; returns those of all.
const std::array<Operands, kLanes>& Show(const Operands& mine, const Place& place) {
  const int thread = TheBlock().current();
  WarpOperands& warp = warps[thread / kLanes];
  const int lane = thread % kLanes;
  std::array<Operands, kLanes>& set = warp.sets[warp.calls[lane]++ % 2];
  set[lane] = mine;
  SyncWarp(WarpOp::kSync, 0xffffffffu, 0, 0, kLanes, place);
  return set;
}

float Bf16(uint32_t bits) {
  bits <<= 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float Half(uint32_t bits) {
  _Float16 half;
  const uint16_t low = static_cast<uint16_t>(bits);
  std::memcpy(&half, &low, sizeof(half));
  return static_cast<float>(half);
}

// Calls add(i, word of the row, word of the column) for result i = 0..3 of the lane and each of the
// 8 words of 4 bytes.
template <typename Add>
void ForEachWord(const std::array<Operands, kLanes>& all, const Add& add) {
  const int lane = TheBlock().current() % kLanes;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    for (int word = 0; word < 8; ++word) {
      const Operands& of_row = all[row % 8 * 4 + word % 4];
      const Operands& of_column = all[column * 4 + word % 4];
      add(i, of_row.a[row / 8 + word / 4 * 2], of_column.b[word / 4]);
    }
  }
}

}  // namespace

void MmaS8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4],
           Place place) {
  const auto& all = Show({{a[0], a[1], a[2], a[3]}, {b0, b1}, nullptr}, place);
  int sums[4] = {c[0], c[1], c[2], c[3]};
  ForEachWord(all, [&](int i, uint32_t x, uint32_t y) {
    sums[i] = __dp4a(static_cast<int>(x), static_cast<int>(y), sums[i]);
  });
  std::memcpy(d, sums, sizeof(sums));
}

void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Place place) {
  const auto& all = Show({{a[0], a[1], a[2], a[3]}, {b0, b1}, nullptr}, place);
  ForEachWord(all, [&](int i, uint32_t x, uint32_t y) { AddProductsBf16(x, y, &d[i]); });
}

void ShowRows(const uint32_t (&a)[4], uint32_t (&rows)[2][8], const Place& place) {
  const auto& all = Show({{a[0], a[1], a[2], a[3]}, {0, 0}, nullptr}, place);
  const int lane = TheBlock().current() % kLanes;
  for (int r = 0; r < 2; ++r) {
    for (int word = 0; word < 8; ++word) {
      rows[r][word] = all[lane / 4 * 4 + word % 4].a[r + word / 4 * 2];
    }
  }
}

void AddProductsBf16(uint32_t a, uint32_t b, float* sum) {
  *sum += Bf16(a & 0xffffu) * Bf16(b & 0xffffu);
  *sum += Bf16(a >> 16) * Bf16(b >> 16);
}

void MmaF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Place place) {
  const auto& all = Show({{a[0], a[1], a[2], a[3]}, {b0, b1}, nullptr}, place);
  ForEachWord(all, [&](int i, uint32_t x, uint32_t y) {
    d[i] += Half(x & 0xffffu) * Half(y & 0xffffu);
    d[i] += Half(x >> 16) * Half(y >> 16);
  });
}

void LoadMatrices(uint32_t (&r)[4], const uint8_t* row, Place place) {
  const auto& all = Show({{}, {}, row}, place);
  const int lane = TheBlock().current() % kLanes;
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&r[i], all[8 * i + lane / 4].row + lane % 4 * 4, 4);
  }
}

void LoadTransposed(uint32_t (&r)[4], const uint8_t* row, Place place) {
  const auto& all = Show({{}, {}, row}, place);
  const int lane = TheBlock().current() % kLanes;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int k = 0; k < 2; ++k) {
      std::memcpy(pair + k, all[8 * i + lane % 4 * 2 + k].row + lane / 4 * 2, 2);
    }
    std::memcpy(&r[i], pair, 4);
  }
}

uint32_t HalfBits(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

uint32_t Bf16Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

}  // namespace emulate
