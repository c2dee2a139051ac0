#include "cuda/poller.h"

#include <utility>

#include "common/numerics.h"

namespace strata {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLook{2};  // between two looks of a poller that sleeps

}  // namespace

Poller::Poller(Bell* bell, std::function<void(uint64_t)> answer)
    : bell_(bell), answer_(std::move(answer)), thread_([this] { Loop(); }) {}

Poller::~Poller() { Stop(milliseconds::max()); }

void Poller::Wake() {
  wakes_.fetch_add(1);
  wake_.notify_one();
}

bool Poller::Stop(milliseconds grace) {
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  stop_.store(true);
  wake_.notify_all();
  const auto gone = [this] { return gone_; };
  if (grace == milliseconds::max()) {
    wake_.wait(lock, gone);
  } else if (!wake_.wait_for(lock, grace, gone)) {
    thread_.detach();  // it ends when it can; nobody joins it any more
    return false;
  }
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  return true;
}

bool Poller::Recover(milliseconds grace) {
  const auto deadline = Clock::now() + grace;
  const auto idle = [this] {
    return !busy_.load() && __atomic_load_n(&bell_->doorbell, __ATOMIC_ACQUIRE) ==
                                __atomic_load_n(&bell_->done, __ATOMIC_ACQUIRE);
  };
  while (!idle()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  __atomic_store_n(&bell_->aborted, 0, __ATOMIC_RELEASE);
  return true;
}

void Poller::Loop() {
  const FloatMode mode;
  uint64_t answered = 0;
  int64_t wakes = 0;
  auto until = Clock::now();
  for (int64_t turn = 1; !stop_.load(); ++turn) {
    const uint64_t epoch = __atomic_load_n(&bell_->doorbell, __ATOMIC_ACQUIRE);
    if (epoch != answered) {
      Answer(epoch);
      answered = epoch;
      until = Clock::now() + kLinger;
      continue;
    }
    // No pause: a guest machine that pauses in a loop may be taken off its processor.
    if (turn % 256 != 0) continue;
    Beat();
    std::this_thread::yield();  // on a machine with one core the others must get on
    if (const int64_t now = wakes_.load(); now != wakes) {
      wakes = now;
      until = Clock::now() + kLinger;
    }
    if (Clock::now() < until) continue;
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    wake_.wait_for(lock, kLook, [&] { return stop_.load() || wakes_.load() != wakes; });
  }
  const std::lock_guard<std::mutex> lock(sleep_mutex_);
  gone_ = true;
  wake_.notify_all();
}

void Poller::Answer(uint64_t epoch) {
  busy_.store(true);
  stall_.Pass();
  if (!Aborted()) answer_(epoch);
  __atomic_store_n(&bell_->done, epoch, __ATOMIC_RELEASE);
  busy_.store(false);
}

}  // namespace strata
