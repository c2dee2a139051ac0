// Barriers in shared memory, and the copies that arrive at them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "emulate/async.h"
#include "emulate/block.h"

namespace emulate {
namespace {

struct BulkCopy {
  void* to;
  const void* from;
  int bytes;
  Barrier* barrier;
  Place place;
};

std::vector<BulkCopy> bulk_copies;  // of the block

void EndPhase(Barrier* barrier) {
  if (barrier->arrived != barrier->expected || barrier->bytes != 0) return;
  barrier->arrived = 0;
  ++barrier->phase;
}

void Arrive(Barrier* barrier) {
  ++barrier->arrived;
  EndPhase(barrier);
  TheBlock().StopSpinning();
}

// Makes the copies that arrive at a barrier.
void MakeCopies(const Barrier* barrier) {
  const auto others =
      std::stable_partition(bulk_copies.begin(), bulk_copies.end(),
                            [&](const BulkCopy& copy) { return copy.barrier == barrier; });
  for (auto copy = bulk_copies.begin(); copy != others; ++copy) {
    std::memcpy(copy->to, copy->from, static_cast<size_t>(copy->bytes));
    copy->barrier->bytes -= copy->bytes;
    EndPhase(copy->barrier);
    TheBlock().StopSpinning();
  }
  bulk_copies.erase(bulk_copies.begin(), others);
}

}  // namespace

void ArriveAtBarrier(Barrier* barrier) { Arrive(barrier); }

void ExpectBytesAtBarrier(Barrier* barrier, int bytes) {
  barrier->bytes += bytes;
  Arrive(barrier);
}

void CopyToBarrier(void* to, const void* from, int bytes, Barrier* barrier, Place place) {
  const auto low = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                   static_cast<uintptr_t>(bytes);
  if (low % 16 != 0) Fail("a bulk copy that is not aligned to 16 bytes", place);
  std::memset(to, 0xff, static_cast<size_t>(bytes));
  bulk_copies.push_back({to, from, bytes, barrier, place});
}

void AwaitBarrier(const Barrier* barrier, unsigned parity, Place place) {
  while ((barrier->phase & 1) == parity) {
    MakeCopies(barrier);
    if ((barrier->phase & 1) == parity) TheBlock().Spin(place);
  }
  TheBlock().StopSpinning();
}

const Place* BulkNotWaitedFor() {
  return bulk_copies.empty() ? nullptr : &bulk_copies.front().place;
}

void ForgetBulkCopies() { bulk_copies.clear(); }

}  // namespace emulate
