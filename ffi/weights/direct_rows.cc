#include "weights/direct_rows.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace strata {
namespace {

constexpr uint64_t kTellEvery = 32;  // answers; a wake-up costs more than an answer

// Reads that cover sorted rows; read i serves the rows [first_row[i], first_row[i + 1]).
struct ReadPlan {
  std::vector<PageRead> reads;
  std::vector<size_t> first_row;
};

template <typename Wanted>
ReadPlan PlanReads(const std::vector<Wanted>& sorted, const DirectRowsOptions& options) {
  const int64_t slot_bytes = DirectRows::SlotBytes(options.row_bytes, options.page);
  ReadPlan plan;
  int64_t begin = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const int64_t at = options.base + sorted[i].row * options.row_bytes;
    const int64_t end = at + options.row_bytes;
    // Joins the read before only where they share a page: reading between them would cost more.
    const bool joins =
        !plan.reads.empty() && at < begin + plan.reads.back().length && end - begin <= slot_bytes;
    if (!joins) {
      begin = at / options.page * options.page;
      plan.reads.push_back({begin, 0, 0});
      plan.first_row.push_back(i);
    }
    PageRead& read = plan.reads.back();
    read.needed = static_cast<int32_t>(end - begin);
    read.length =
        static_cast<int32_t>((end - begin + options.page - 1) / options.page * options.page);
  }
  plan.first_row.push_back(sorted.size());
  return plan;
}

}  // namespace

DirectRows::DirectRows(DirectRowsOptions options, TableCounters* counters)
    : options_(std::move(options)),
      counters_(counters),
      cache_(options_.cache_bytes, options_.row_bytes, options_.num_rows),
      demand_(options_.make_engine, options_.depth, options_.timeout),
      ahead_(options_.make_engine, options_.depth, options_.timeout) {}

std::string DirectRows::Describe(int64_t row, const std::string& what) const {
  return options_.name + ": row " + std::to_string(row) + " at byte " +
         std::to_string(options_.base + row * options_.row_bytes) + " gave: " + what + ", " +
         std::to_string(options_.row_bytes) + " bytes expected";
}

template <typename Ready>
bool DirectRows::AwaitProgress(std::unique_lock<std::mutex>* lock, Ready ready) {
  uint64_t seen = progress_;
  auto deadline = std::chrono::steady_clock::now() + 2 * options_.timeout;
  ++num_waiting_;
  while (!ready()) {
    changed_.wait_until(*lock, deadline);
    if (progress_ != seen) {
      seen = progress_;
      deadline = std::chrono::steady_clock::now() + 2 * options_.timeout;
    } else if (std::chrono::steady_clock::now() >= deadline) {
      break;
    }
  }
  --num_waiting_;
  return ready();
}

// With mutex_ held: the row is in the cache, or its read has failed.
void DirectRows::Land(int64_t row) {
  const auto found = in_flight_.find(row);
  if (--found->second == 0) in_flight_.erase(found);
}

// Reads rows, sorted and counted in in_flight_; none is in flight afterwards.
std::string DirectRows::ReadInFlight(DirectReader* reader, const std::vector<Wanted>& mine,
                                     int* error) {
  const ReadPlan plan = PlanReads(mine, options_);
  std::vector<bool> landed(plan.reads.size());
  const auto arrived = [&](int64_t index, const uint8_t* bytes) {
    const PageRead& read = plan.reads[index];
    std::lock_guard lock(mutex_);
    for (size_t i = plan.first_row[index]; i < plan.first_row[index + 1]; ++i) {
      const auto& [row, out] = mine[i];
      const uint8_t* from = bytes + (options_.base + row * options_.row_bytes - read.offset);
      if (out != nullptr) std::memcpy(out, from, options_.row_bytes);
      cache_.Put(row, from);
      Land(row);
    }
    landed[index] = true;
    if (++progress_ % kTellEvery == 0 && num_waiting_ > 0) changed_.notify_all();
    counters_->reads.fetch_add(1);
    counters_->bytes_read.fetch_add(read.length);
    counters_->Beat();
  };
  const std::optional<ReadFault> fault = reader->Read(plan.reads, arrived);
  std::lock_guard lock(mutex_);
  if (num_waiting_ > 0) changed_.notify_all();
  if (!fault.has_value()) return "";
  for (size_t i = 0; i < plan.reads.size(); ++i) {
    if (landed[i]) continue;
    for (size_t k = plan.first_row[i]; k < plan.first_row[i + 1]; ++k) Land(mine[k].row);
  }
  *error = fault->error;
  return Describe(mine[plan.first_row[fault->read]].row, fault->what);
}

std::string DirectRows::Demand(const std::vector<Wanted>& mine, int* error) {
  if (mine.empty()) return "";
  {
    std::unique_lock lock(mutex_);
    if (!AwaitProgress(&lock, [&] { return !demand_busy_; })) {
      for (const Wanted& each : mine) Land(each.row);
      *error = ETIMEDOUT;
      return Describe(mine[0].row, "the reads before it do not end");
    }
    demand_busy_ = true;
  }
  const std::string wrong = ReadInFlight(&demand_, mine, error);
  std::lock_guard lock(mutex_);
  demand_busy_ = false;
  if (num_waiting_ > 0) changed_.notify_all();
  return wrong;
}

std::string DirectRows::AwaitOthers(const std::vector<Wanted>& others, int* error) {
  if (others.empty()) return "";
  std::vector<Wanted> mine;
  {
    std::unique_lock lock(mutex_);
    size_t next = 0;  // of the others; all before it have come
    const bool came = AwaitProgress(&lock, [&] {
      while (next < others.size() && !in_flight_.contains(others[next].row)) ++next;
      return next == others.size();
    });
    if (!came) {
      *error = ETIMEDOUT;
      return Describe(others[0].row, "the read ahead of it does not end");
    }
    // A row may have failed, or been replaced in the cache already: then it is read again.
    for (const Wanted& each : others) {
      if (cache_.Get(each.row, each.out)) continue;
      mine.push_back(each);
      ++in_flight_[each.row];
    }
  }
  return Demand(mine, error);
}

// Hands out what the cache has, and splits the rest.
void DirectRows::Split(std::span<const int64_t> rows, uint8_t* out, Missing* missing) {
  std::vector<std::pair<int64_t, uint8_t*>> absent;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < rows.size(); ++i) {
    uint8_t* place = out + static_cast<int64_t>(i) * options_.row_bytes;
    if (!cache_.Get(rows[i], place)) absent.push_back({rows[i], place});
  }
  counters_->cache_hits.fetch_add(static_cast<int64_t>(rows.size() - absent.size()));
  std::sort(absent.begin(), absent.end());
  for (size_t i = 0, first = 0; i < absent.size(); ++i) {
    const auto& [row, place] = absent[i];
    if (row == absent[first].first && i != first) {
      missing->repeats.push_back({place, absent[first].second});
      continue;
    }
    first = i;
    // Without a cache a row that somebody else reads never gets here.
    if (cache_.num_places() > 0 && in_flight_.contains(row)) {
      missing->others.push_back({row, place});
    } else {
      missing->mine.push_back({row, place});
      ++in_flight_[row];
    }
  }
}

std::string DirectRows::Read(std::span<const int64_t> rows, uint8_t* out, int* error) {
  int ignored = 0;
  if (error == nullptr) error = &ignored;
  Missing missing;
  Split(rows, out, &missing);
  counters_->repeats.fetch_add(static_cast<int64_t>(missing.repeats.size()));
  counters_->awaited.fetch_add(static_cast<int64_t>(missing.others.size()));
  std::string wrong = Demand(missing.mine, error);
  if (wrong.empty()) wrong = AwaitOthers(missing.others, error);
  if (!wrong.empty()) return wrong;
  for (const auto& [to, from] : missing.repeats) std::memcpy(to, from, options_.row_bytes);
  return "";
}

void DirectRows::Fetch(std::span<const int64_t> rows) {
  std::vector<int64_t> sorted(rows.begin(), rows.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  std::vector<Wanted> mine;
  {
    std::lock_guard lock(mutex_);
    for (const int64_t row : sorted) {
      if (cache_.Has(row) || in_flight_.contains(row)) continue;
      mine.push_back({row, nullptr});
      ++in_flight_[row];
    }
  }
  int error = 0;
  const bool failed = !mine.empty() && !ReadInFlight(&ahead_, mine, &error).empty();
  (failed ? counters_->ahead_dropped : counters_->ahead_rows)
      .fetch_add(static_cast<int64_t>(mine.size()));
}

}  // namespace strata
