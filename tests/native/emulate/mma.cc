#include "emulate/mma.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "emulate/block.h"
#include "emulate/cuda.h"

namespace emulate {
namespace {

constexpr int kLanes = 32;

int ThreadNumber() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}

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
  const int thread = ThreadNumber();
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
  const int lane = ThreadNumber() % kLanes;
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

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

struct Copies {
  std::vector<Copy> begun;     // in order
  std::vector<size_t> groups;  // how many of them each closed group ends with

  // Makes the first `count`.
  void Make(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const Copy& copy = begun[i];
      if (copy.valid) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
    begun.erase(begun.begin(), begun.begin() + static_cast<ptrdiff_t>(count));
    for (size_t& end : groups) end -= std::min(end, count);
  }
};

std::array<Copies, kMostThreads> copies;

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
  ForEachWord(all, [&](int i, uint32_t x, uint32_t y) {
    d[i] += Bf16(x & 0xffffu) * Bf16(y & 0xffffu);
    d[i] += Bf16(x >> 16) * Bf16(y >> 16);
  });
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
  const int lane = ThreadNumber() % kLanes;
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&r[i], all[8 * i + lane / 4].row + lane % 4 * 4, 4);
  }
}

void LoadTransposed(uint32_t (&r)[4], const uint8_t* row, Place place) {
  const auto& all = Show({{}, {}, row}, place);
  const int lane = ThreadNumber() % kLanes;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int k = 0; k < 2; ++k) {
      std::memcpy(pair + k, all[8 * i + lane % 4 * 2 + k].row + lane / 4 * 2, 2);
    }
    std::memcpy(&r[i], pair, 4);
  }
}

void GroupMmaS8(int* d, int num_columns, uint64_t rows, uint64_t columns) {
  // A tile begins at a multiple of its 128 bytes a row.
  const auto word = [](uint64_t operand, int row, int number) {
    const uint64_t chunk = operand % 128 / 16 + static_cast<uint64_t>(number / 4);
    const uint64_t at = operand / 128 * 128 + static_cast<uint64_t>(row) * 128 +
                        ((chunk ^ static_cast<uint64_t>(row)) & 7) * 16;
    int value;
    std::memcpy(&value, reinterpret_cast<const uint8_t*>(at) + number % 4 * 4, 4);
    return value;
  };
  const int thread = ThreadNumber() % 128;
  for (int n = 0; n < num_columns / 2; ++n) {
    const int e = n % 4;
    const int row = thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8;
    const int column = n / 4 * 8 + thread % 4 * 2 + e % 2;
    d[n] = 0;
    for (int i = 0; i < 8; ++i) d[n] = __dp4a(word(rows, row, i), word(columns, column, i), d[n]);
  }
}

void CopyAsync(void* to, const void* from, bool valid, Place place) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    Fail("an asynchronous copy that is not aligned to 16 bytes", place);
  }
  std::memset(to, 0xff, 16);
  copies[ThreadNumber()].begun.push_back({to, from, valid});
}

void WaitForCopies() {
  Copies& own = copies[ThreadNumber()];
  own.Make(own.begun.size());
  own.groups.clear();
}

void EndCopyGroup() {
  Copies& own = copies[ThreadNumber()];
  own.groups.push_back(own.begun.size());
}

void WaitForGroups(int last) {
  Copies& own = copies[ThreadNumber()];
  const int done = static_cast<int>(own.groups.size()) - last;
  if (done <= 0) return;
  own.Make(own.groups[done - 1]);
  own.groups.erase(own.groups.begin(), own.groups.begin() + done);
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
