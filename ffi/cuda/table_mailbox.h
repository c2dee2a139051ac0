// How kernels ask the host for rows of a table that lies in a file, inside one captured step.
//
// One letter is under way at most: ngram_ask, the first kernel of a step, rings; ngram_rows of the
// same step waits for the answer, and the next step starts behind it in stream order. In between
// the host reads while the device works on the layers in front of the one that wants the rows.
//
// Page-locked memory that the device reaches (TableMailbox), byte by byte:
//      0  the bell (bell.h, with the order of things)
//    256  refused  host writes: the epoch of the newest letter that it could not answer, before
//         `done`, which the device reads first
//    320  letters  two, letter_bytes apart; epoch n uses letter n % 2
//    then answers  two, answer_bytes apart, in the same order
// A letter: how many rows; at 64 their numbers. An answer: the raw bytes of these rows, one after
// the other in the letter's order; of a refused letter it means nothing.
//
// In the device's memory: TableMailboxState. Which block looks at `done` for all is settled by who
// takes `looking` first: that one runs, whatever order blocks are started in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/bell.h"

namespace strata {

struct TableLetter {
  int64_t count;
  unsigned char to_64[56];
  int64_t rows[8];  // as many as a step may ask for
};
static_assert(offsetof(TableLetter, rows) == 64);

struct TableMailbox : Bell {
  alignas(64) uint64_t refused;
  alignas(64) unsigned char letters[64];  // as many bytes as letters and answers need
};
static_assert(sizeof(TableMailbox) == sizeof(Bell) + 128);

struct TableMailboxState : BellState {
  uint32_t looking;  // blocks of the running ngram_rows that came so far
  uint32_t refused;  // the answer that is there means nothing
};

struct TableMailboxSizes {
  int64_t most_rows;
  int64_t letter_bytes;
  int64_t answer_bytes;
};

inline TableMailboxSizes SizesOfTableMailbox(int64_t most_rows, int64_t row_bytes) {
  const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  // Whole words of 16 bytes around a row are read.
  return {most_rows, 64 + padded(most_rows * 8), padded(most_rows * row_bytes + 16)};
}

inline int64_t BytesOfTableMailbox(const TableMailboxSizes& sizes) {
  return static_cast<int64_t>(sizeof(Bell)) + 64 + 2 * (sizes.letter_bytes + sizes.answer_bytes);
}

// What kernels are told; addresses are the device's.
struct TableMailboxAt {
  TableMailbox* box = nullptr;  // null: the table is in memory
  TableMailboxState* state = nullptr;
  unsigned char* answers = nullptr;  // both
  TableMailboxSizes sizes = {};
};

}  // namespace strata
