#include "weights/mapped_rows.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

namespace strata {
namespace {

using Clock = std::chrono::steady_clock;

// The system cuts a request to read ahead down to the device's read-ahead size, 128 KiB by default.
constexpr int64_t kAsk = int64_t{128} << 10;
constexpr int64_t kStep = int64_t{1} << 20;    // between two looks at the clock
constexpr int64_t kAhead = int64_t{16} << 20;  // requested beyond what is being waited for

constexpr size_t kProbeRows = 16;
constexpr size_t kAskedRows = 256;                      // of those that were asked for
constexpr std::chrono::nanoseconds kResidentRow(4000);  // to ask for and copy; a fault takes more

constexpr int64_t kSamplePages = 65536;
constexpr int64_t kWindowPages = 64;

uint8_t* RoundDown(const uint8_t* address, int64_t page) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(address);
  return reinterpret_cast<uint8_t*>(value / page * page);
}

// Faults pages in. Unlike a touch it reports a broken disk instead of ending the process.
int Populate(uint8_t* begin, int64_t num_bytes, int64_t page) {
#if defined(MADV_POPULATE_READ)
  if (madvise(begin, static_cast<size_t>(num_bytes), MADV_POPULATE_READ) == 0) return 0;
  // EINVAL: older than Linux 5.14.
  if (errno != EINVAL && errno != EINTR && errno != EAGAIN) return errno;
#endif
  for (int64_t at = 0; at < num_bytes; at += page) {
    static_cast<void>(*static_cast<volatile uint8_t*>(begin + at));
  }
  return 0;
}

// Pages of [begin, begin + num_pages * page) that are in memory; -1 without an answer.
int64_t CountResident(uint8_t* begin, int64_t num_pages, int64_t page,
                      std::vector<unsigned char>* flags) {
  flags->resize(static_cast<size_t>(num_pages));
  if (mincore(begin, static_cast<size_t>(num_pages * page), flags->data()) != 0) return -1;
  return std::count_if(flags->begin(), flags->end(), [](unsigned char flag) { return flag & 1; });
}

}  // namespace

MappedRows::MappedRows(const uint8_t* first, int64_t num_rows, int64_t row_bytes)
    : first_(first), num_rows_(num_rows), row_bytes_(row_bytes), page_(sysconf(_SC_PAGESIZE)) {
  begin_ = RoundDown(first, page_);
  end_ = RoundDown(first + num_rows * row_bytes + page_ - 1, page_);
}

MappedRows::~MappedRows() {
  if (!locked()) return;
  // The first and the last page may belong to a neighbour who locked them too; they stay locked
  // until the mapping goes.
  const int64_t inner = end_ - begin_ - 2 * page_;
  if (inner > 0) munlock(begin_ + page_, static_cast<size_t>(inner));
}

// Asking costs 20 times the copy of a row that is there, and a row that is not costs four times as
// much without asking. So the time that the rows before took decides.
void MappedRows::Read(std::span<const int64_t> rows, uint8_t* out,
                      const std::function<void()>& beat) const {
  bool asked = expects_faults_.load(std::memory_order_relaxed);
  auto start = Clock::now();
  if (asked) WillNeed(rows);
  for (size_t begin = 0; begin < rows.size();) {
    const size_t end = std::min(rows.size(), begin + (asked ? kAskedRows : kProbeRows));
    for (size_t i = begin; i < end; ++i) {
      std::memcpy(out + static_cast<int64_t>(i) * row_bytes_, Row(rows[i]), row_bytes_);
    }
    const auto now = Clock::now();
    const bool faulted = now - start > kResidentRow * (end - begin);
    if (faulted && !asked) WillNeed(rows.subspan(end));
    asked = asked || faulted;
    expects_faults_.store(faulted, std::memory_order_relaxed);
    beat();
    begin = end;
    start = now;
  }
}

void MappedRows::WillNeed(std::span<const int64_t> rows) const {
  for (const int64_t row : rows) {
    uint8_t* begin = RoundDown(Row(row), page_);
    const int64_t num_bytes = Row(row) + row_bytes_ - begin;
    // Only advice: what it does not achieve the read itself does.
    static_cast<void>(madvise(begin, static_cast<size_t>(num_bytes), MADV_WILLNEED));
  }
}

int MappedRows::Lock() {
#if defined(MLOCK_ONFAULT)
  if (mlock2(begin_, static_cast<size_t>(end_ - begin_), MLOCK_ONFAULT) != 0) return errno;
  locked_.store(true);
  return 0;
#else
  return ENOSYS;
#endif
}

std::string MappedRows::Load(double max_s, int64_t* loaded) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(max_s);
  const int64_t total = end_ - begin_;
  if (loaded_ ==
      0) {  // single rows were expected so far, which keeps the system from reading ahead
    static_cast<void>(madvise(begin_, static_cast<size_t>(total), MADV_NORMAL));
  }
  for (bool first = true; loaded_ < total && (first || Clock::now() < deadline); first = false) {
    for (; asked_ < std::min(total, loaded_ + kAhead); asked_ += kAsk) {
      const int64_t length = std::min(kAsk, total - asked_);
      static_cast<void>(madvise(begin_ + asked_, static_cast<size_t>(length), MADV_WILLNEED));
    }
    const int64_t step = std::min(kStep, total - loaded_);
    const int error = Populate(begin_ + loaded_, step, page_);
    if (error != 0) {
      return "bytes " + std::to_string(loaded_) + " to " + std::to_string(loaded_ + step) +
             " of the table cannot be read: " + std::strerror(error);
    }
    loaded_ += step;
  }
  if (loaded_ == total && !locked()) {  // what the system drops again comes back row by row
    static_cast<void>(madvise(begin_, static_cast<size_t>(total), MADV_RANDOM));
  }
  *loaded = std::min(loaded_, num_bytes());
  return "";
}

double MappedRows::Residency() const {
  std::vector<unsigned char> flags;
  const int64_t num_pages = (end_ - begin_) / page_;
  if (num_pages <= kSamplePages) {
    const int64_t resident = CountResident(begin_, num_pages, page_, &flags);
    return resident < 0 ? -1.0 : static_cast<double>(resident) / static_cast<double>(num_pages);
  }
  constexpr int64_t kWindows = kSamplePages / kWindowPages;
  int64_t sum = 0;
  for (int64_t i = 0; i < kWindows; ++i) {
    const int64_t page = (num_pages - kWindowPages) * i / (kWindows - 1);
    const int64_t resident = CountResident(begin_ + page * page_, kWindowPages, page_, &flags);
    if (resident < 0) return -1.0;
    sum += resident;
  }
  return static_cast<double>(sum) / static_cast<double>(kSamplePages);
}

}  // namespace strata
