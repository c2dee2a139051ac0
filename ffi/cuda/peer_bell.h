// How the primary's kernels learn, while they run, that a peer's rows of a layer are there.
//
// A join by events would start the primary's second kernel behind the peer's: everything that it
// does before it needs the rows would wait, too. So it starts at once and looks here; the events
// join behind it. Only where devices reach each other's memory, for over mapped memory of the host
// a look would cost what it saves, and where both devices' kernels have no more than a block a
// multiprocessor (DownBlocks).
//
// In the primary's memory (PeerNews):
//      0  awaited  the primary's first kernel of a layer writes: layers whose rows were asked for
//      8  failed   the primary's kernels write 1 when one gave up waiting
//    128  told     [kMostTellers] the peer's blocks write, each its own: layers whose rows it
//    stored
// In the peer's memory (PeerTurn): layers that its first kernel has begun. In page-locked memory
// that the primary reaches (PeerLimit): aborted, which the device writes 1, and timeout_ms, which
// the host writes.
//
// Order. A block of the peer's second kernel stores its rows, meets, and one thread writes `told`
// with release at system scope: release is cumulative, so that holds for what it has met. Each of
// as many threads of a block of the primary reads one `told` with acquire at system scope, then
// they meet, then read rows with loads that no cache keeps. `awaited` and the peer's turn are
// written a kernel before those that read them. Both numbers rise by one for each layer that forks.
// Should they ever part (a launch that failed half way), no wait ends well, for it is for an equal
// number: that is a time-out, not rows of another layer.
//
// No deadlock. What the peer's kernels need is behind the fork and done when the primary's kernels
// begin, but for room: on a card of its own the peer has it. On the primary's own card (loopback)
// the kernel that waits leaves multiprocessors to the other (PeerStore::ShareCard). All steps of a
// process are on one stream of a device, so no two such kernels wait at once. What is left to the
// driver there is that it lets two branches of a graph run side by side: it does, unless told
// otherwise (CUDA_DEVICE_MAX_CONNECTIONS=1, profilers that run kernels one by one).
// Time-out: after it the rows mean nothing, no later kernel waits, and the host, which sees
// `aborted` behind the step, clears the words when all that is queued has ended.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata {

inline constexpr int kMostTellers = 512;

struct PeerNews {
  uint64_t awaited;
  uint32_t failed;
  alignas(128) uint64_t told[kMostTellers];
};
static_assert(offsetof(PeerNews, failed) == 8 && offsetof(PeerNews, told) == 128);

struct PeerTurn {
  uint64_t begun;
};

struct PeerLimit {
  uint32_t aborted;
  uint32_t timeout_ms;
};

// What both devices' kernels are told. Without tellers nobody looks.
struct PeerBellAt {
  PeerNews* news = nullptr;
  PeerTurn* turn = nullptr;
  PeerLimit* limit = nullptr;
  int32_t tellers = 0;  // blocks of the peer's second kernel, at most kMostTellers
};

}  // namespace strata
