// qsa_attend for prompt tiles: many rows, keys and values of 16 or 8 bits, by matrix units.
//
// The function is that of ffi/cuda/ops/qsa_attend.h, in another order of sums: a tile and a window
// are told apart by the read map (contract C). A row's list of cells is walked in units of 16 cells
// with a running maximum, all query heads of a key head as the rows of one fragment. The order
// follows from the row's own list alone: not from the other rows, nor from the row's place.
//
// Queries and weights are rounded to halves, as the cached keys and values are, or more finely than
// those; stored halves and int8 codes are exact in the matrix unit, whose sums are float32.
//
// A warp has a row and a key head to itself and meets no other: its cells come by asynchronous
// copies into its own ring of shared memory, some units ahead of their use. Copies go past the
// first cache: neighbouring rows select much the same cells, but what they could share there does
// not outlive what lies between (measured: 5 % slower through it, for lists that overlap by 7/8,
// too).
#pragma once

#include <string>

#include "cuda/ops/qsa_attend.h"

namespace strata {

// Whether the call's sizes are those the kernel is made for; known from shapes alone.
bool QsaAttendTilesApply(const QsaAttendArgs& args);

std::string QsaAttendTiles(const QsaAttendArgs& args, cudaStream_t stream);

}  // namespace strata
