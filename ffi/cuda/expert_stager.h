// Panels of experts that have none in page-locked memory, made ahead of a ring's copies.
//
// A thread of the host, the stager, goes through the ring's entries (expert_ring.h) in their order,
// ahead of the issuer. What has to be made is made by a pool of threads, in the next of a few
// page-locked buffers, which are used in turns. A buffer is written again when the issuer has taken
// what was in it and the event that was recorded behind the copy has come.
//
// Numbers, pointers and counts are passed under a mutex: there is one for every expert, which takes
// a tenth of a millisecond or more to make. `beat` changes with every piece of work: a gate that
// waits takes it for a sign of life, so a slow disk is no fault.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "common/thread_pool.h"
#include "cuda/launch.h"

namespace strata {

class ExpertStager {
 public:
  // Parts of an expert that are made side by side: quarters of its three matrices.
  static constexpr int64_t kParts = 12;
  struct Work {
    // Whether entry n has to be made, now that it is its turn.
    std::function<bool(uint64_t n)> is_wanted;
    // Writes a part of it to where it belongs in the buffer.
    std::function<void(uint64_t n, int64_t part, uint8_t* to)> make;
  };

  // On the current device. `beat`: changed as long as there is work and somebody does it. Throws
  // std::runtime_error where page-locked memory is short.
  ExpertStager(int64_t buffer_bytes, int num_threads, Work work, uint64_t* beat);
  ~ExpertStager();
  ExpertStager(const ExpertStager&) = delete;
  ExpertStager& operator=(const ExpertStager&) = delete;

  // Page-locked bytes for buffers of that size.
  static int64_t PinnedBytes(int64_t buffer_bytes) { return kBuffers * buffer_bytes; }

  // Entries up to `target` may be made.
  void Raise(uint64_t target);
  // Where entry n is, as soon as it is there; null if it was not wanted, or after Halt.
  const uint8_t* Await(uint64_t n);
  // What Await returned last has been copied from on this stream.
  cudaError_t Taken(cudaStream_t stream);
  // Forgets everything that was made; work begins again with entry 0 after Resume.
  void Halt();
  void Resume();

 private:
  static constexpr int64_t kBuffers = 32;
  // Experts made at once: enough for many threads, and few enough for the first to be there soon.
  static constexpr int64_t kAtOnce = 16;
  struct Made {
    uint64_t n;
    int64_t buffer;
  };

  void Release();
  void Loop();
  uint64_t Collect(std::vector<Made>* batch) const;
  void Produce(const std::vector<Made>& batch);

  Work work_;
  uint64_t* beat_;
  int64_t buffer_bytes_;
  int device_ = 0;
  uint8_t* memory_ = nullptr;
  std::vector<cudaEvent_t> landed_;  // behind the last copy out of each buffer
  ThreadPool pool_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Made> made_;  // all of these under mutex_
  uint64_t next_ = 0;      // the first entry that was not looked at
  uint64_t target_ = 0;
  int64_t begun_ = 0;  // turns of buffers
  int64_t over_ = 0;
  bool halted_ = false;
  bool busy_ = false;
  bool stop_ = false;
  std::atomic<bool> abandon_{false};
  std::thread thread_;
};

}  // namespace strata
