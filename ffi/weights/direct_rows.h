// Rows of a table in a file by unbuffered reads of the pages around them, with a cache of rows.
//
// Any number of threads may call Read, one thread at a time Fetch. What they share:
//   cache_       under mutex_. A row's bytes are copied in after its read was answered in full.
//   in_flight_   under mutex_: how many readers have a row between asking and answer. A reader
//   raises the
//                count for its rows before it starts, and lowers it once per row, after cache_ has
//                the row or its read failed. So who finds a row here waits for it instead of
//                reading it twice.
//   demand_busy_ under mutex_: a Read uses demand_, which serves one thread at a time.
//   progress_    under mutex_: grows with every answer. Waits are for changed_ and give up when
//   nothing
//                was answered for twice the time-out: a reader in the kernel gives up first
//                (direct_reader.h) and tells everybody. No ring of waits: a reader has ended its
//                own rows and given demand_ back before it waits for the rows of others.
//   ahead_       used by Fetch only.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weights/direct_reader.h"
#include "weights/row_cache.h"
#include "weights/table_counters.h"

namespace strata {

struct DirectRowsOptions {
  std::string name;  // of the file, for messages
  int64_t base = 0;  // byte of the file where row 0 starts
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  int64_t page = 4096;  // what offsets and lengths of reads are multiples of
  int depth = 256;
  int64_t cache_bytes = 0;
  std::chrono::milliseconds timeout{30000};
  // Engines of `depth` slots of SlotBytes bytes.
  DirectReader::EngineFactory make_engine;
};

class DirectRows {
 public:
  DirectRows(DirectRowsOptions options, TableCounters* counters);

  // Pages that the longest stretch around one row can touch, in bytes.
  static int64_t SlotBytes(int64_t row_bytes, int64_t page) {
    return ((row_bytes + page - 2) / page + 1) * page;
  }

  // Rows to out [rows.size(), row_bytes]; a repeated row is read once. Returns what went wrong, or
  // an empty string, and in *error (if given) its errno.
  std::string Read(std::span<const int64_t> rows, uint8_t* out, int* error = nullptr);

  // Reads rows into the cache. Failures are counted; the Read that wants the row reports them.
  void Fetch(std::span<const int64_t> rows);

  // Ends a Fetch that runs and all later ones.
  void CancelFetch() { ahead_.Cancel(); }

  int64_t cache_places() const { return cache_.num_places(); }

 private:
  struct Wanted {
    int64_t row;
    uint8_t* out;  // null: for the cache only
  };

  struct Missing {
    std::vector<Wanted> mine;    // to be read, sorted, and counted in in_flight_
    std::vector<Wanted> others;  // being read by somebody else
    std::vector<std::pair<uint8_t*, const uint8_t*>> repeats;  // to, from
  };

  void Split(std::span<const int64_t> rows, uint8_t* out, Missing* missing);
  std::string Demand(const std::vector<Wanted>& mine, int* error);
  std::string AwaitOthers(const std::vector<Wanted>& others, int* error);
  std::string ReadInFlight(DirectReader* reader, const std::vector<Wanted>& mine, int* error);
  template <typename Ready>
  bool AwaitProgress(std::unique_lock<std::mutex>* lock, Ready ready);
  void Land(int64_t row);
  std::string Describe(int64_t row, const std::string& what) const;

  const DirectRowsOptions options_;
  TableCounters* const counters_;
  std::mutex mutex_;
  std::condition_variable changed_;
  RowCache cache_;
  std::unordered_map<int64_t, int> in_flight_;
  bool demand_busy_ = false;
  uint64_t progress_ = 0;
  int num_waiting_ = 0;
  DirectReader demand_;
  DirectReader ahead_;
};

}  // namespace strata
