#include "emulate/block.h"

#include <algorithm>
#include <numeric>

#include "emulate/async.h"
#include "emulate/cuda.h"
#include "emulate/messages.h"

namespace emulate {
namespace {

constexpr int kLanes = 32;

}  // namespace

Block& TheBlock() {
  static Block* block = new Block;  // never destroyed: a process may end while it waits
  return *block;
}

void Block::Resize(dim3 size, uint64_t seed) {
  const int count = static_cast<int>(size.x * size.y * size.z);
  size_ = size;
  seed_ = seed;
  random_.seed(seed);
  threads_.resize(count);
  order_.resize(count);
  std::iota(order_.begin(), order_.end(), 0);
  if (seed == 1) std::reverse(order_.begin(), order_.end());
  for (int t = 0; t < count; ++t) {
    const unsigned n = static_cast<unsigned>(t);
    threads_[t].index = {n % size.x, n / size.x % size.y, n / (size.x * size.y)};
    threads_[order_[t]].position = t;
  }
}

void Block::Shuffle() {
  for (int i = static_cast<int>(order_.size()) - 1; i > 0; --i) {
    std::swap(order_[i], order_[Random(static_cast<uint64_t>(i) + 1)]);
  }
  for (size_t i = 0; i < order_.size(); ++i) threads_[order_[i]].position = static_cast<int>(i);
}

void Block::Reset() {
  if (seed_ > 1) Shuffle();
  const int count = static_cast<int>(threads_.size());
  ready_ = {};
  for (int t = 0; t < count; ++t) {
    threads_[t].stack = -1;
    threads_[t].ended = false;
    threads_[t].waits = false;
    SetReady(t, true);
  }
  for (int w = 0; w * kLanes < count; ++w) {
    const int lanes = std::min(kLanes, count - w * kLanes);
    warps_[w].alive = lanes == kLanes ? 0xffffffffu : (1u << lanes) - 1;
    warps_[w].num_groups = 0;
  }
  num_ended_ = 0;
  num_at_barrier_ = 0;
  votes_ = 0;
  spins_ = 0;
  error_.clear();
}

std::string Block::Run(void (*body)(const void*), const void* context) {
  body_ = body;
  context_ = context;
  Reset();
  current_ = order_[0];
  Thread& first = threads_[current_];
  first.stack = stacks_.Take();
  stacks_.Prepare(first.stack, &Block::Entry, &first.flow);
  threadIdx = first.index;
  caller_ = {};
  running_ = true;
  Switch(&caller_, &first.flow, false);
  running_ = false;
  if (!error_.empty()) ForgetWaits();
  if (num_ended_ != static_cast<int>(threads_.size())) stacks_.GiveBackAll();
  return error_;
}

// A fiber's outermost function: the thread it was made for and, after that, every thread that is to
// start when one of them ends.
void Block::Entry() {
  Block& block = TheBlock();
  Started(&block.caller_);
  for (;;) {
    block.body_(block.context_);
    const Place* begun = NotWaitedFor();
    if (begun != nullptr) block.Fail("the thread ended and had not waited for this", *begun);
    block.EndCurrent();
    const int ended = block.current_;
    const int next = block.Next(true);
    const int stack = block.threads_[ended].stack;
    if (next >= 0 && block.threads_[next].stack < 0) {
      block.threads_[next].stack = stack;
      block.threads_[next].flow = block.threads_[ended].flow;
      block.current_ = next;
      threadIdx = block.threads_[next].index;
      continue;
    }
    block.stacks_.GiveBack(stack);
    if (next < 0) block.LeaveBlock();
    block.current_ = next;
    threadIdx = block.threads_[next].index;
    Switch(&block.threads_[ended].flow, &block.threads_[next].flow, true);
  }
}

// Back to the caller of Run, from the current thread for good: nothing on its stack is destroyed,
// so messages are made in statements of their own.
void Block::LeaveBlock() {
  if (error_.empty() && num_ended_ != static_cast<int>(threads_.size())) error_ = Stuck();
  Switch(&threads_[current_].flow, &caller_, true);
  __builtin_unreachable();
}

void Block::Fail(const char* what, const Place& place) {
  error_ = Here(place) + ": " + what;
  LeaveBlock();
}

int Block::Next(bool near) const {
  const int from = threads_[current_].position;
  int word = from / 64;
  const uint64_t after = from % 64 == 63 ? 0 : ~uint64_t{0} << (from % 64 + 1);
  if (near && seed_ <= 1) {
    const uint64_t bits = ready_[word] & uint64_t{0xffffffff} << (from % 64 / 32 * 32);
    const uint64_t first = (bits & after) != 0 ? bits & after : bits;
    if (first != 0) return order_[word * 64 + __builtin_ctzll(first)];
  }
  // The rest of the current word, the others, and the beginning of the current word.
  const int words = (static_cast<int>(threads_.size()) + 63) / 64;
  uint64_t bits = ready_[word] & after;
  for (int i = 0; i <= words; ++i) {
    if (bits != 0) return order_[word * 64 + __builtin_ctzll(bits)];
    word = word + 1 == words ? 0 : word + 1;
    bits = ready_[word];
  }
  return -1;
}

// Hands over from the current thread, which waits or yields.
void Block::Continue(int next) {
  if (next < 0) LeaveBlock();
  if (next == current_) return;
  Thread& from = threads_[current_];
  Thread& to = threads_[next];
  if (to.stack < 0) {
    to.stack = stacks_.Take();
    stacks_.Prepare(to.stack, &Block::Entry, &to.flow);
  }
  current_ = next;
  threadIdx = to.index;
  Switch(&from.flow, &to.flow, false);
}

void Block::SetReady(int thread, bool ready) {
  const int position = threads_[thread].position;
  const uint64_t bit = uint64_t{1} << (position % 64);
  if (ready) {
    ready_[position / 64] |= bit;
  } else {
    ready_[position / 64] &= ~bit;
  }
}

void Block::EndCurrent() {
  Thread& thread = threads_[current_];
  thread.ended = true;
  SetReady(current_, false);
  ++num_ended_;
  Warp& warp = warps_[current_ / kLanes];
  warp.alive &= ~(1u << (current_ % kLanes));
  // Threads that have ended are waited for no longer.
  for (int g = warp.num_groups - 1; g >= 0; --g) {
    if (warp.groups[g].arrived == (warp.groups[g].mask & warp.alive)) Finish(current_ / kLanes, g);
  }
  const int alive = static_cast<int>(threads_.size()) - num_ended_;
  if (num_at_barrier_ > 0 && num_at_barrier_ == alive) ReleaseBlock();
}

void Block::ReleaseBlock() {
  result_ = {votes_, num_at_barrier_};
  for (size_t t = 0; t < threads_.size(); ++t) {
    if (threads_[t].ended) continue;
    threads_[t].waits = false;
    SetReady(static_cast<int>(t), true);
  }
  num_at_barrier_ = 0;
  votes_ = 0;
}

BlockVotes Block::SyncBlock(int predicate, const Place& place) {
  spins_ = 0;
  Thread& thread = threads_[current_];
  if (num_at_barrier_ == 0) {
    barrier_ = &place;
  } else if (!SamePlace(*barrier_, place)) {
    error_ = Here(place) + ": __syncthreads, where others of the block wait at " + Text(*barrier_) +
             "; all must meet at one";
    LeaveBlock();
  }
  ++num_at_barrier_;
  votes_ += predicate != 0;
  if (num_at_barrier_ + num_ended_ == static_cast<int>(threads_.size())) {
    ReleaseBlock();
    return result_;
  }
  thread.waits = true;
  thread.mask = 0;
  thread.place = &place;
  SetReady(current_, false);
  Continue(Next(true));
  return result_;
}

void Block::Yield() {
  spins_ = 0;
  Continue(Next(false));
}

// All take turns, so each has looked in vain.
void Block::Spin(const Place& place) {
  if (++spins_ > static_cast<int>(threads_.size())) Fail("a wait for what nobody does", place);
  Continue(Next(false));
}

Block::Group* Block::Arrive(int warp_index, int lane, WarpOp op, unsigned mask,
                            const Place& place) {
  Warp& warp = warps_[warp_index];
  const unsigned bit = 1u << lane;
  if ((mask & bit) == 0) Fail("its lane is not in the mask", place);
  Group* group = nullptr;
  for (int g = 0; g < warp.num_groups && group == nullptr; ++g) {
    if (warp.groups[g].mask == mask) group = &warp.groups[g];
  }
  if (group == nullptr) {
    group = &warp.groups[warp.num_groups++];
    *group = {mask, 0, op};
  }
  if (group->op != op) {
    Fail("other lanes of its mask wait in another operation", place);
  }
  group->arrived |= bit;
  return group;
}

uint64_t Block::SyncWarp(WarpOp op, unsigned mask, uint64_t value, int other, int width,
                         const Place& place) {
  if (width < 1 || width > kLanes || (width & (width - 1)) != 0) {
    Fail("a width that is no power of 2 up to 32", place);
  }
  spins_ = 0;
  const int self = current_;
  Thread& thread = threads_[self];
  const int warp = self / kLanes;
  Group* group = Arrive(warp, self % kLanes, op, mask, place);
  thread.op = op;
  thread.mask = mask;
  thread.value = value;
  thread.other = other;
  thread.width = static_cast<uint8_t>(width);
  thread.place = &place;
  if (group->arrived == (mask & warps_[warp].alive)) {
    Finish(warp, static_cast<int>(group - warps_[warp].groups.data()));
    return thread.value;
  }
  thread.waits = true;
  SetReady(self, false);
  Continue(Next(true));
  return thread.value;
}

}  // namespace emulate
