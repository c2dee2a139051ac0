// The host's thread that reads rows of a table for a device's steps (table_mailbox.h), by whatever
// way the table reads them (weights/ngram_table.h).
//
// Threads: Problem, Recover, SetTimeout, Wake and stall() from any; the table is read by the
// poller's. problem_ under mutex_: what was wrong with the first letter that could not be
// answered, until Recover.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/poller.h"
#include "cuda/table_mailbox.h"
#include "weights/ngram_table.h"

namespace strata {

class TableReader {
 public:
  // For steps that ask for up to `most_rows` rows. Returns what is wrong, or an empty string and
  // the reader. `timeout_ms`: silence after which a step is given up.
  static std::string Open(std::shared_ptr<NgramTable> table, int64_t most_rows, int64_t timeout_ms,
                          std::unique_ptr<TableReader>* reader);
  ~TableReader();
  TableReader(const TableReader&) = delete;
  TableReader& operator=(const TableReader&) = delete;

  // Ends the thread, with no step under way; false if it is stuck. Then the object must be kept for
  // good.
  bool Stop();

  const TableMailboxAt& at() const { return at_; }
  void Wake() { poller_->Wake(); }
  // Why results of the steps since the last Recover mean nothing; empty if they do.
  std::string Problem() const;
  // Makes the mailbox fit for use again, with no step under way; false if the thread is still lost.
  bool Recover();
  void SetTimeout(int64_t timeout_ms);
  Stall& stall() { return poller_->stall(); }

 private:
  explicit TableReader(std::shared_ptr<NgramTable> table) : table_(std::move(table)) {}
  std::string Allocate(int64_t most_rows);
  void Answer(uint64_t epoch);

  std::shared_ptr<NgramTable> table_;
  TableMailbox* box_ = nullptr;
  TableMailboxAt at_;
  mutable std::mutex mutex_;
  std::string problem_;
  std::unique_ptr<Poller> poller_;
};

}  // namespace strata
