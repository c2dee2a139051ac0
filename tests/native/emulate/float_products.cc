#include "emulate/float_products.h"

#include <algorithm>
#include <cstring>

#include "emulate/async.h"
#include "emulate/block.h"
#include "emulate/mma.h"

namespace emulate {
namespace {

constexpr uint32_t kPoison = 0xffffffffu;  // a NaN
constexpr int kChunk = 16;

bool IsPoison(const float& value) { return std::memcmp(&value, &kPoison, sizeof(value)) == 0; }

// 16 values of row or column `number` of an operand in shared memory.
void ReadValues(uint64_t operand, int number, const Place& place, uint32_t (&words)[8]) {
  const uint64_t line = operand >> 48, first = operand << 16 >> 16;
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint64_t at = first + chunk * line + static_cast<uint64_t>(number) * kChunk;
    std::memcpy(words + 4 * chunk, ForUnits(at, place), kChunk);
  }
}

}  // namespace

FloatProducts::Sums& FloatProducts::Of(float* d) {
  return *std::find_if(sums_.begin(), sums_.end(), [&](const Sums& s) { return s.d == d; });
}

void FloatProducts::Begin(float* d, int num_columns, uint64_t rows, uint64_t columns,
                          const Place& place) {
  Push({d, num_columns, rows, columns, place});
}

void FloatProducts::Begin(float* d, int num_columns, const uint32_t (&a)[4], uint64_t columns,
                          const Place& place) {
  Product product = {d, num_columns, 0, columns, place, a, {a[0], a[1], a[2], a[3]}};
  ShowRows(a, product.shown, place);
  Push(product);
}

void FloatProducts::Push(const Product& product) {
  products_.push_back(product);
  float* d = product.d;
  const int count = product.num_columns / 2;
  const auto same = [&](const Sums& s) { return s.d == d; };
  if (std::none_of(sums_.begin(), sums_.end(), same)) {
    sums_.push_back({d, 0, std::vector<float>(d, d + count)});
    for (int i = 0; i < count; ++i) std::memcpy(d + i, &kPoison, sizeof(kPoison));
  }
  ++Of(d).pending;
}

void FloatProducts::Make(const Product& product) {
  const int thread = TheBlock().current() % 128;
  uint32_t rows[2][8], column[8];
  if (product.own == nullptr) {
    for (int r = 0; r < 2; ++r) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * r;
      ReadValues(product.rows, row, product.place, rows[r]);
    }
  } else {
    std::memcpy(rows, product.shown, sizeof(rows));
    if (!std::equal(product.was, product.was + 4, product.own)) {
      Fail("registers of a product that changed before it was waited for", product.place);
    }
  }
  Sums& sums = Of(product.d);
  for (int n = 0; n < product.num_columns / 2; n += 4) {
    for (int c = 0; c < 2; ++c) {
      ReadValues(product.columns, n / 4 * 8 + thread % 4 * 2 + c, product.place, column);
      for (int r = 0; r < 2; ++r) {
        float& sum = sums.values[static_cast<size_t>(n + 2 * r + c)];
        for (int i = 0; i < 8; ++i) AddProductsBf16(rows[r][i], column[i], &sum);
      }
    }
  }
  if (--sums.pending > 0) return;
  for (size_t i = 0; i < sums.values.size(); ++i) {
    if (!IsPoison(sums.d[i])) Fail("sums that changed before they were there", product.place);
    sums.d[i] = sums.values[i];
  }
  sums_.erase(sums_.begin() + (&sums - sums_.data()));
}

void FloatProducts::Wait(int pending) {
  const int groups = static_cast<int>(ends_.size()) - pending;
  if (groups <= 0) return;
  const size_t done = ends_[static_cast<size_t>(groups) - 1];
  for (size_t i = 0; i < done; ++i) Make(products_[i]);
  products_.erase(products_.begin(), products_.begin() + static_cast<ptrdiff_t>(done));
  ends_.erase(ends_.begin(), ends_.begin() + groups);
  for (size_t& end : ends_) end -= done;
}

void FloatProducts::Clear() {
  products_.clear();
  ends_.clear();
  sums_.clear();
}

}  // namespace emulate
