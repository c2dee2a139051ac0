// The n-gram table: rows of a GGUF tensor [R, C] that is far larger than what a step needs of it,
// from wherever it lies. Three modes, the same bytes:
//
//   mmap    rows are copied from the file's mapping; the system's page cache decides what stays
//   ram     the same, with the mapping locked, or at least brought in once
//   direct  unbuffered reads of the pages around the rows, many in flight, and a cache of rows
//
// Threads. Everything here is constant after Open but for the parts below, each with its own rules
// in its own header; there is no other shared word.
//   counters_  atomics, read at any time                                     (table_counters.h)
//   mapped_    Load: one thread at a time; the rest: any                     (mapped_rows.h)
//   direct_    Read: any thread; Fetch: the queue's thread                   (direct_rows.h)
//   queue_     Push: any thread; its thread calls Fetch or WillNeed          (ahead_queue.h)
// queue_ is declared last: it ends its thread before what that thread uses goes away, and direct_
// is told first, so that closing waits for one time slice and not for a disk.
//
// Programs name a table by its slot in a registry, as they do weight stores (weight_store.h). A
// table is held by shared_ptr while it is read, so closing it cannot pull it from under an op; the
// mapping has to outlive both.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "common/gguf_types.h"
#include "weights/ahead_queue.h"
#include "weights/direct_rows.h"
#include "weights/mapped_rows.h"
#include "weights/table_counters.h"

namespace strata {

enum class TableMode { kMmap, kRam, kDirect };

struct NgramTableOptions {
  TableMode mode = TableMode::kMmap;
  const TypeInfo* type = nullptr;
  int64_t num_rows = 0;                      // R
  int64_t num_cols = 0;                      // C
  const uint8_t* mapped = nullptr;           // row 0 in the mapping
  std::string path;                          // the mapped file
  std::string name;                          // of it in a step's errors: UTF-8; empty: the path
  int64_t offset = 0;                        // byte of the file where row 0 starts
  int depth = 256;                           // reads in flight (direct)
  int64_t cache_bytes = int64_t{64} << 20;   // of the row cache (direct)
  std::chrono::milliseconds timeout{30000};  // without any answer (direct)
  bool use_uring = true;  // false: threads that block, whatever the kernel offers
  // For tests: opens the file for unbuffered reads (a descriptor, or minus an errno), makes
  // engines.
  std::function<int(const char*)> open_direct;
  DirectReader::EngineFactory make_engine;
};

class NgramTable {
 public:
  // Checks everything that later calls rely on. Returns what is wrong, or an empty string and the
  // table.
  static std::string Open(const NgramTableOptions& options, std::shared_ptr<NgramTable>* table);
  ~NgramTable();

  // The mode in use: kMmap where kDirect was asked for and the file system has no unbuffered reads.
  TableMode mode() const { return mode_; }
  // What is not as asked for, and why; empty if nothing.
  const std::string& note() const { return note_; }
  // How rows are read, in a few words.
  const std::string& how() const { return how_; }

  const TypeInfo* type() const { return type_; }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_cols() const { return num_cols_; }
  int64_t row_bytes() const { return row_bytes_; }

  // Raw bytes of rows to out [count, row_bytes]. Returns what went wrong, with row and byte of the
  // file, or an empty string; after an error `out` means nothing.
  std::string ReadRows(const int64_t* rows, int64_t count, uint8_t* out);

  // Starts to read rows that will be wanted soon; returns at once. Rows outside the table are an
  // error, anything else that fails is left to the ReadRows that wants the row.
  std::string Prefetch(const int64_t* rows, int64_t count);

  // Ram: locks what arrives from now on; an errno where the system does not allow it.
  int Lock() { return mapped_.Lock(); }
  // Ram: brings the next part in (mapped_rows.h). Returns what went wrong, or an empty string.
  std::string Load(double max_s, int64_t* loaded) { return mapped_.Load(max_s, loaded); }
  bool locked() const { return mapped_.locked(); }

  // Fraction of the table in the page cache, by a bounded look; -1 where the system does not say.
  double Residency() const;

  const TableCounters& counters() const { return counters_; }
  // Signs of life of the reading threads go there (table_counters.h).
  void BeatAt(uint64_t* word) { counters_.beat.store(word); }

 private:
  explicit NgramTable(const NgramTableOptions& options);
  std::string OpenDirect(const NgramTableOptions& options);
  DirectReader::EngineFactory ChooseEngine(const NgramTableOptions& options,
                                           std::shared_ptr<const OpenedFile> file, int64_t page);
  std::string CompareWithMapping(const NgramTableOptions& options);
  void FallBack(const std::string& path, const std::string& why);
  std::string CheckRows(const char* what, std::span<const int64_t> rows) const;

  TableMode mode_;
  const TypeInfo* type_;
  int64_t num_rows_;
  int64_t num_cols_;
  int64_t row_bytes_;
  bool sees_residency_;
  std::string note_;
  std::string how_;
  TableCounters counters_;
  MappedRows mapped_;
  std::optional<DirectRows> direct_;
  std::optional<AheadQueue> queue_;
};

// The process-wide registry. Slots are reused lowest first; it is never destroyed.
int64_t AddTable(std::shared_ptr<NgramTable> table);
void RemoveTable(int64_t slot);
std::shared_ptr<NgramTable> FindTable(int64_t slot);  // null if the slot is free

}  // namespace strata
