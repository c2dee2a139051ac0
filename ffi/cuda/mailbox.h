// How a kernel asks the host for rows of experts, and how the host answers, inside one captured
// step.
//
// One letter is under way at most: the first kernel of a layer's expert_ffn rings, the second waits
// for the answer, and the next layer starts behind it in stream order. So one doorbell and one flag
// serve all layers, and the letter tells the layer. Both hold an epoch, which the graph raises.
//
// Page-locked memory that the device reaches (Mailbox), byte by byte:
//      0  the bell (bell.h)
//    256  letters   two, letter_bytes apart; epoch n uses letter n % 2
// A letter: layer, live rows; at 64 a mask of each row's entries for the host; at ids_at the
// experts of all entries, [window_rows, A]; at x_at x [window_rows, width], of which only rows with
// such an entry are written. Rows (an allocation of its own): [2, window_rows * A, width], the
// answers to both letters.
//
// In the device's memory: BellState, and `rung`.
//
// Order. The device writes a letter, then the doorbell with release at system scope; the host reads
// the doorbell with acquire, then the letter. The host's threads write rows, the last one's end is
// seen by the poller (ThreadPool), which writes `done` with release; the device reads `done` with
// acquire at system scope, then the rows, with loads that no cache keeps.
//
// A letter waits behind whatever the device has asked of the link before: with the panels of a
// whole layer ahead of it the host would start when the device is done. So blocks that read panels
// over the link start when `rung` says so, or after a while: nothing but time depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/bell.h"

namespace strata {

struct Letter {
  int32_t layer;
  int32_t num_live;
  unsigned char to_64[56];
  uint32_t masks[1];  // as many as rows; the rest follows at the offsets of MailboxSizes
};
static_assert(offsetof(Letter, masks) == 64);

struct Mailbox : Bell {
  alignas(64) unsigned char letters[64];  // as many bytes as both need
};
static_assert(sizeof(Mailbox) == sizeof(Bell) + 64);

struct MailboxState : BellState {
  uint32_t rung;  // this layer's letter is on its way, or there is none
};

inline constexpr int32_t kMostLetterRows = 64;

struct MailboxSizes {
  int32_t window_rows;
  int32_t num_active;
  int32_t width;
  int32_t ids_at;
  int32_t x_at;
  int32_t letter_bytes;
  int64_t row_floats;  // of one answer
};

inline MailboxSizes SizesOfMailbox(int64_t window_rows, int64_t num_active, int64_t width) {
  const auto padded = [](int64_t bytes) { return static_cast<int32_t>((bytes + 63) / 64 * 64); };
  MailboxSizes s = {};
  s.window_rows = static_cast<int32_t>(window_rows);
  s.num_active = static_cast<int32_t>(num_active);
  s.width = static_cast<int32_t>(width);
  s.ids_at = 64 + padded(window_rows * 4);
  s.x_at = s.ids_at + padded(window_rows * num_active * 4);
  s.letter_bytes = s.x_at + padded(window_rows * width * 4);
  s.row_floats = window_rows * num_active * width;
  return s;
}

// What kernels are told.
struct MailboxAt {
  Mailbox* box = nullptr;         // the device's address; null: the host computes nothing
  MailboxState* state = nullptr;  // device
  float* rows = nullptr;          // the device's address of both answers
  MailboxSizes sizes = {};
  int32_t layer = 0;
};

}  // namespace strata
