// Rows of a table inside a read-only file mapping: read where they lie, loaded and locked on
// request.
//
// Load is for one thread at a time; everything else may be called by any number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace strata {

class MappedRows {
 public:
  // `first`: address of row 0. The mapping must outlive this.
  MappedRows(const uint8_t* first, int64_t num_rows, int64_t row_bytes);
  ~MappedRows();
  MappedRows(const MappedRows&) = delete;
  MappedRows& operator=(const MappedRows&) = delete;

  const uint8_t* Row(int64_t row) const { return first_ + row * row_bytes_; }

  // Copies rows to out [rows.size(), row_bytes], asking for those that are not in memory all at
  // once; calls `beat` after every few. A disk that fails ends the process (SIGBUS).
  void Read(std::span<const int64_t> rows, uint8_t* out, const std::function<void()>& beat) const;

  // Asks the system to read the rows' pages, all at once instead of one fault after the other.
  void WillNeed(std::span<const int64_t> rows) const;

  // Locks the pages as they arrive: takes no time and reads nothing. Returns an errno.
  int Lock();
  bool locked() const { return locked_.load(); }

  // Brings the next pages in, in order, for at most about `max_s` seconds. *loaded: bytes of the
  // table that came in so far. Returns what went wrong, or an empty string.
  std::string Load(double max_s, int64_t* loaded);

  // Fraction of pages in memory. Looks at no more than 65536 of them, spread evenly. -1 without an
  // answer.
  double Residency() const;

  int64_t num_bytes() const { return num_rows_ * row_bytes_; }

 private:
  const uint8_t* first_;
  int64_t num_rows_;
  int64_t row_bytes_;
  int64_t page_;
  uint8_t* begin_;  // whole pages around the table
  uint8_t* end_;
  int64_t asked_ = 0;   // bytes from begin_ on that Load asked for
  int64_t loaded_ = 0;  // and that came
  std::atomic<bool> locked_{false};
  mutable std::atomic<bool> expects_faults_{true};  // a guess about the next Read's pages
};

}  // namespace strata
