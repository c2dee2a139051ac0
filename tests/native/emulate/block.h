// One block of threads as fibers: which can run, which wait for whom, which have ended.
//
// The current thread keeps running until it waits; then the next one in the block's order that can
// run is continued, or started. A thread that ends hands its stack, warm, to the next one that is
// to be started, so threads that never wait all run on one.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "emulate/fiber.h"
#include "emulate/sync.h"
#include "emulate/vectors.h"

namespace emulate {

inline constexpr int kMostThreads = 1024;

class Block {
 public:
  // Sets the size of the blocks that follow and how their threads are ordered.
  void Resize(dim3 size, uint64_t seed);

  // Runs one block; returns what went wrong, or an empty string.
  std::string Run(void (*body)(const void*), const void* context);

  BlockVotes SyncBlock(int predicate, const Place& place);
  uint64_t SyncWarp(WarpOp op, unsigned mask, uint64_t value, int other, int width,
                    const Place& place);
  void Yield();
  // Lets others run; an error where all of them do nothing else.
  void Spin(const Place& place);
  void StopSpinning() { spins_ = 0; }
  bool running() const { return running_; }
  // Whether all threads but the running one have ended.
  bool IsLast() const { return num_ended_ + 1 == static_cast<int>(threads_.size()); }
  int current() const { return current_; }  // the running thread's number
  bool YieldsAtAtomics() const { return seed_ > 1 && running_; }
  uint64_t Random(uint64_t below) { return random_() % below; }
  [[noreturn]] void Fail(const char* what, const Place& place);

 private:
  struct alignas(64) Thread {
    Flow flow;
    uint64_t value = 0;            // given to the other lanes, then got from them
    const Place* place = nullptr;  // where it waits; on its stack
    uint3 index = {};
    int stack = -1;     // none before the thread starts
    int position = 0;   // in the order
    unsigned mask = 0;  // of the lanes waited for; 0: the block
    int other = 0;
    uint8_t width = 0;
    WarpOp op = WarpOp::kSync;
    bool ended = false;
    bool waits = false;
  };
  struct Group {  // lanes that wait for the same ones
    unsigned mask;
    unsigned arrived;
    WarpOp op;
  };
  struct Warp {
    unsigned alive = 0;
    int num_groups = 0;
    std::array<Group, 32> groups;
  };

  static void Entry();
  void Reset();
  void Shuffle();
  // The thread to run after the current one, -1 if none can. `near`: from its warp if possible,
  // whose stacks are in the cache.
  int Next(bool near) const;
  void Continue(int next);
  void EndCurrent();
  [[noreturn]] void LeaveBlock();
  void SetReady(int thread, bool ready);
  void ReleaseBlock();
  void Finish(int warp, int group);
  Group* Arrive(int warp, int lane, WarpOp op, unsigned mask, const Place& place);
  std::string Here(const Place& place) const;
  std::string Stuck() const;

  std::vector<Thread> threads_;
  std::vector<int> order_;
  std::array<uint64_t, kMostThreads / 64> ready_ = {};  // by position
  std::array<Warp, kMostThreads / 32> warps_;
  dim3 size_;
  int current_ = 0;
  int num_ended_ = 0;
  int num_at_barrier_ = 0;
  int votes_ = 0;
  int spins_ = 0;  // by whichever threads, with nothing in between
  BlockVotes result_ = {};
  const Place* barrier_ = nullptr;
  bool running_ = false;
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
  Flow caller_;
  StackPool stacks_;
  void (*body_)(const void*) = nullptr;
  const void* context_ = nullptr;
  std::string error_;
};

Block& TheBlock();

}  // namespace emulate
