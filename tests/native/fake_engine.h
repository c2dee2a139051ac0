// A read engine over bytes in memory that answers as a test says.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "weights/read_engine.h"

namespace strata {

// What happens to the n-th read that was started (from 0 on, over all engines of a script).
struct Script {
  const std::vector<uint8_t>* file = nullptr;
  std::function<int32_t(int n, int64_t offset, int32_t result)> result;  // changes a read's result
  std::function<bool(int n)> hangs;                                      // never answered
  std::chrono::milliseconds pause{0};                                    // before every answer
  std::atomic<bool> held{false};                                         // nothing is answered
  std::atomic<int> started{0};
  int most_in_flight = 0;
  int engines = 0;
};

class FakeEngine final : public ReadEngine {
 public:
  FakeEngine(std::shared_ptr<Script> script, int depth, int64_t slot_bytes)
      : script_(std::move(script)), slot_bytes_(slot_bytes), buffers_(depth * slot_bytes, 0xEE) {
    ++script_->engines;
  }

  const uint8_t* Buffer(int slot) const override { return &buffers_[slot * slot_bytes_]; }

  void Start(int slot, int64_t offset, int32_t length) override {
    const int n = script_->started++;
    ++in_flight_;
    script_->most_in_flight = std::max(script_->most_in_flight, in_flight_);
    if (script_->hangs && script_->hangs(n)) return;
    const int64_t size = static_cast<int64_t>(script_->file->size());
    auto result = static_cast<int32_t>(std::clamp<int64_t>(size - offset, 0, length));
    if (script_->result) result = script_->result(n, offset, result);
    if (result > 0) {
      std::memcpy(&buffers_[slot * slot_bytes_], script_->file->data() + offset, result);
    }
    answers_.push_back({slot, result});
  }

  int Wait(int at_least, std::chrono::milliseconds wait,
           std::vector<ReadAnswer>* answers) override {
    if (script_->held) {
      std::this_thread::sleep_for(std::min(wait, std::chrono::milliseconds(5)));
      return 0;
    }
    std::this_thread::sleep_for(answers_.empty() ? wait : std::min(wait, script_->pause));
    const size_t ready = script_->pause.count() > 0 ? 1 : static_cast<size_t>(at_least);
    for (size_t i = 0; i < ready && !answers_.empty(); ++i) {
      answers->push_back(answers_.back());  // the last one first: the order is not the caller's
      answers_.pop_back();
      --in_flight_;
    }
    return 0;
  }

 private:
  std::shared_ptr<Script> script_;
  int64_t slot_bytes_;
  std::vector<uint8_t> buffers_;
  std::vector<ReadAnswer> answers_;
  int in_flight_ = 0;
};

}  // namespace strata
