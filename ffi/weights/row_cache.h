// The last rows read, in sets of four by the row's hash: the newest of a set replaces the oldest.
//
// Not thread-safe: its owner's mutex guards it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace strata {

class RowCache {
 public:
  // At most `num_bytes`, none where that is less than a set. A table that fits has a place per row.
  RowCache(int64_t num_bytes, int64_t row_bytes, int64_t num_rows) : row_bytes_(row_bytes) {
    // 9: who is in the place, and a share in the set's hand; more than enough.
    const int64_t room = num_bytes / (row_bytes + 9);
    holds_all_ = room >= num_rows;
    num_sets_ = holds_all_ ? (num_rows + kWays - 1) / kWays : room / kWays;
    // calloc: pages that no row has touched yet cost nothing. Owner 0 marks an empty place.
    owners_.reset(static_cast<int64_t*>(std::calloc(num_places() + 1, sizeof(int64_t))));
    hands_.reset(static_cast<uint8_t*>(std::calloc(num_sets_ + 1, 1)));
    bytes_.reset(static_cast<uint8_t*>(std::calloc(num_places() + 1, row_bytes)));
    if (owners_ == nullptr || hands_ == nullptr || bytes_ == nullptr) num_sets_ = 0;
  }

  int64_t num_places() const { return num_sets_ * kWays; }

  bool Has(int64_t row) const { return Find(row) >= 0; }

  // False if the row is not here.
  bool Get(int64_t row, uint8_t* out) const {
    const int64_t place = Find(row);
    if (place < 0) return false;
    std::memcpy(out, &bytes_[place * row_bytes_], row_bytes_);
    return true;
  }

  void Put(int64_t row, const uint8_t* bytes) {
    if (num_sets_ == 0 || Has(row)) return;
    const int64_t set = Set(row);
    const int64_t place = holds_all_ ? row : set * kWays + hands_[set]++ % kWays;
    owners_[place] = row + 1;
    std::memcpy(&bytes_[place * row_bytes_], bytes, row_bytes_);
  }

 private:
  static constexpr int64_t kWays = 4;

  struct Free {
    void operator()(void* pointer) const { std::free(pointer); }
  };

  int64_t Set(int64_t row) const {
    if (holds_all_) return row / kWays;
    const uint64_t mixed = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15u;
    return static_cast<int64_t>((mixed >> 32) * static_cast<uint64_t>(num_sets_) >> 32);
  }

  int64_t Find(int64_t row) const {
    if (num_sets_ == 0) return -1;
    const int64_t first = Set(row) * kWays;
    for (int64_t place = first; place < first + kWays; ++place) {
      if (owners_[place] == row + 1) return place;
    }
    return -1;
  }

  int64_t row_bytes_;
  int64_t num_sets_;
  bool holds_all_;
  std::unique_ptr<int64_t[], Free> owners_;
  std::unique_ptr<uint8_t[], Free> hands_;  // of each set: places filled so far, the oldest follows
  std::unique_ptr<uint8_t[], Free> bytes_;
};

}  // namespace strata
