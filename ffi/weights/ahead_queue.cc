#include "weights/ahead_queue.h"

#include <algorithm>
#include <vector>

namespace strata {

AheadQueue::~AheadQueue() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

int64_t AheadQueue::Push(std::span<const int64_t> rows) {
  std::lock_guard lock(mutex_);
  const int64_t room = std::max<int64_t>(0, limit_ - static_cast<int64_t>(waiting_.size()));
  const int64_t taken = std::min<int64_t>(room, static_cast<int64_t>(rows.size()));
  if (taken == 0) return 0;
  waiting_.insert(waiting_.end(), rows.begin(), rows.begin() + taken);
  if (!thread_.joinable()) thread_ = std::thread([this] { Work(); });
  wake_.notify_one();
  return taken;
}

void AheadQueue::Work() {
  std::vector<int64_t> rows;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    const auto end = waiting_.begin() + std::min<int64_t>(chunk_, waiting_.size());
    rows.assign(waiting_.begin(), end);
    waiting_.erase(waiting_.begin(), end);
    lock.unlock();
    body_(rows);
    lock.lock();
  }
}

}  // namespace strata
