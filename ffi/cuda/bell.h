// How a kernel rings for a thread of the host, and learns that it has answered, inside one captured
// step. What is asked and answered lies beside the bell (mailbox.h, table_mailbox.h).
//
// Page-locked memory that the device reaches (Bell), byte by byte:
//      0  doorbell  device writes: the epoch of the newest letter
//     64  done      host writes: the epoch of the newest answer
//    128  beat      host writes: changes as long as a thread of the host is alive
//    192  aborted   device writes 1 when it gave up waiting, the host 0 when nothing is under way
//    196  timeout_ms  host writes: silence after which the device gives up
// In the device's memory (BellState): epoch, which the graph raises; the letter that is waited for;
// answered; failed. One block looks at `done` and passes the news on there: with the looks of all
// blocks the line would hardly come back to the host, which is to write it.
//
// Order. The device writes a letter, then the doorbell with release at system scope; the host reads
// the doorbell with acquire, then the letter. What the host's threads write is seen by the one that
// writes `done` with release; the device reads `done` with acquire at system scope, then the
// answer, with loads that no cache keeps.
// Letters and answers are two each, by parity: one is overwritten two epochs later, when its answer
// has been awaited; only after a time-out does a thread still use one that nobody waits for. Then
// `failed` is set: no kernel rings and none waits until the host, with no step under way and no
// thread at work, clears both words.
//
// A waiting kernel holds a processor, never another kernel's result: the host's answer needs no
// GPU. Time-out: so long without a change of `beat`. A thread at work changes it with every piece
// of its work, the poller while it has nothing to do, so a slow disk is no fault, but a lost thread
// is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata {

struct Bell {
  alignas(64) uint64_t doorbell;
  alignas(64) uint64_t done;
  alignas(64) uint64_t beat;
  alignas(64) uint32_t aborted;
  uint32_t timeout_ms;
};
static_assert(offsetof(Bell, done) == 64 && offsetof(Bell, beat) == 128 &&
              offsetof(Bell, aborted) == 192 && sizeof(Bell) == 256);

struct BellState {
  uint64_t epoch;
  uint64_t awaited;   // 0: nothing was asked
  uint64_t answered;  // the newest letter whose answer is there
  uint32_t failed;
};

}  // namespace strata
