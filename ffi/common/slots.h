// Objects by number: how compiled programs name what they work on.
//
// A number is the lowest that is free, so that every process counts alike and compiles the same
// programs. The registry is never destroyed; who finds an object shares it for the call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace strata {

template <typename T>
class Slots {
 public:
  // The process-wide registry of such objects.
  static Slots& Global() {
    static auto* slots = new Slots();
    return *slots;
  }

  int64_t Add(std::shared_ptr<T> object) {
    const std::unique_lock lock(mutex_);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i] == nullptr) {
        slots_[i] = std::move(object);
        return static_cast<int64_t>(i);
      }
    }
    slots_.push_back(std::move(object));
    return static_cast<int64_t>(slots_.size()) - 1;
  }

  void Remove(int64_t slot) {
    std::shared_ptr<T> object;  // ends after the lock: its destructor may take long
    const std::unique_lock lock(mutex_);
    if (Has(slot)) object = std::exchange(slots_[slot], nullptr);
  }

  // Null if the slot is free.
  std::shared_ptr<T> Find(int64_t slot) {
    const std::shared_lock lock(mutex_);
    return Has(slot) ? slots_[slot] : nullptr;
  }

 private:
  bool Has(int64_t slot) const { return slot >= 0 && slot < static_cast<int64_t>(slots_.size()); }

  std::shared_mutex mutex_;
  std::vector<std::shared_ptr<T>> slots_;
};

}  // namespace strata
