// Unbuffered reads by threads that block, and what both engines share.
//
// Everything the threads touch lies in State and is guarded by its mutex, but for the buffers: a
// slot's buffer belongs to the thread that took the slot from `waiting`, until it has put the
// answer into `answers`; the mutex orders both. A read may hang in the kernel for ever (a dead
// network drive), and then no thread may wait for it: threads that are left behind share ownership
// of State.

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "weights/read_engine.h"

namespace strata {

OpenedFile::~OpenedFile() {
  if (fd_ >= 0) close(fd_);
}

MappedBuffers::MappedBuffers(int slots, int64_t slot_bytes)
    : slot_bytes_(slot_bytes), num_bytes_(slots * slot_bytes) {
  void* bytes = mmap(nullptr, static_cast<size_t>(num_bytes_), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (bytes != MAP_FAILED) bytes_ = static_cast<uint8_t*>(bytes);
}

MappedBuffers::~MappedBuffers() {
  if (bytes_ != nullptr) munmap(bytes_, static_cast<size_t>(num_bytes_));
}

namespace {

struct Waiting {
  int slot;
  int64_t offset;
  int32_t length;
};

struct State {
  State(std::shared_ptr<const OpenedFile> opened, int depth, int64_t slot_bytes)
      : file(std::move(opened)), buffers(depth, slot_bytes) {}

  const std::shared_ptr<const OpenedFile> file;
  const MappedBuffers buffers;
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::deque<Waiting> waiting;
  std::vector<ReadAnswer> answers;
  int in_flight = 0;  // started and not yet handed out
  size_t wanted = 1;  // answers that whoever waits wants
  bool stop = false;
};

void Serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->work.wait(lock, [&] { return state->stop || !state->waiting.empty(); });
    if (state->stop) return;
    const Waiting read = state->waiting.front();
    state->waiting.pop_front();
    lock.unlock();
    const ssize_t result = pread(state->file->fd(), state->buffers.Slot(read.slot),
                                 static_cast<size_t>(read.length), read.offset);
    const int32_t answer = static_cast<int32_t>(result < 0 ? -errno : result);
    lock.lock();
    state->answers.push_back({read.slot, answer});
    if (state->answers.size() >= state->wanted) state->done.notify_one();
  }
}

class PreadEngine final : public ReadEngine {
 public:
  PreadEngine(std::shared_ptr<State> state, int threads) : state_(std::move(state)) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([shared = state_] { Serve(shared); });
  }

  ~PreadEngine() override {
    bool all_answered;
    {
      std::lock_guard lock(state_->mutex);
      state_->stop = true;
      all_answered = state_->answers.size() == static_cast<size_t>(state_->in_flight);
    }
    state_->work.notify_all();
    for (std::thread& thread : threads_) all_answered ? thread.join() : thread.detach();
  }

  const uint8_t* Buffer(int slot) const override { return state_->buffers.Slot(slot); }

  void Start(int slot, int64_t offset, int32_t length) override {
    {
      std::lock_guard lock(state_->mutex);
      state_->waiting.push_back({slot, offset, length});
      ++state_->in_flight;
    }
    state_->work.notify_one();
  }

  int Wait(int at_least, std::chrono::milliseconds wait,
           std::vector<ReadAnswer>* answers) override {
    std::unique_lock lock(state_->mutex);
    state_->wanted = static_cast<size_t>(at_least);
    state_->done.wait_for(lock, wait, [&] { return state_->answers.size() >= state_->wanted; });
    state_->in_flight -= static_cast<int>(state_->answers.size());
    answers->insert(answers->end(), state_->answers.begin(), state_->answers.end());
    state_->answers.clear();
    return 0;
  }

 private:
  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<ReadEngine> MakePreadEngine(std::shared_ptr<const OpenedFile> file, int depth,
                                            int64_t slot_bytes, int threads) {
  auto state = std::make_shared<State>(std::move(file), depth, slot_bytes);
  if (!state->buffers.valid()) return nullptr;
  return std::make_unique<PreadEngine>(std::move(state), threads);
}

}  // namespace strata
