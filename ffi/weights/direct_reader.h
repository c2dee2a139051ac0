// Many unbuffered reads of whole pages, kept in flight; the answers are checked, repeated where
// that helps, and never handed on when they are short.
//
// One thread at a time may call Read; Cancel may be called by any. No wait is without end: when
// nothing at all has been answered for `timeout`, Read gives up, and the next Read starts with a
// new engine. A slow disk is not a dead one: every answer starts the time-out anew.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weights/read_engine.h"

namespace strata {

struct PageRead {
  int64_t offset;  // in the file; a multiple of the page
  int32_t length;  // whole pages, at most a slot
  int32_t needed;  // bytes that must arrive: the file may end before the last page does
};

struct ReadFault {
  int64_t read;  // index into the reads of the call
  int error;     // errno; ETIMEDOUT when time is up, ECANCELED after Cancel, 0 for a short read
  std::string what;
};

class DirectReader {
 public:
  using EngineFactory = std::function<std::unique_ptr<ReadEngine>()>;
  using Arrived = std::function<void(int64_t read, const uint8_t* bytes)>;

  // `depth`: slots of the engines that `make_engine` gives.
  DirectReader(EngineFactory make_engine, int depth, std::chrono::milliseconds timeout);

  // Calls `arrived` once for every read, in any order, on this thread. The bytes are valid during
  // the call. After a fault the remaining reads may or may not have arrived.
  std::optional<ReadFault> Read(std::span<const PageRead> reads, const Arrived& arrived);

  // Ends a Read that runs and all later ones.
  void Cancel() { cancelled_.store(true); }

 private:
  struct Slot {
    int64_t read = -1;
    int tries = 0;
  };
  struct Job;

  void StartMore(Job* job);
  void Settle(Job* job, const ReadAnswer& answer);
  int64_t FirstOpen() const;
  void Reset();

  EngineFactory make_engine_;
  std::unique_ptr<ReadEngine> engine_;
  std::chrono::milliseconds timeout_;
  std::vector<Slot> slots_;
  std::vector<int> free_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace strata
