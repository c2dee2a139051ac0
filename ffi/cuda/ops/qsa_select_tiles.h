// The scores of qsa_select for prompt tiles, by matrix units.
//
// Queries and pooled keys are split into two halves each and three of their four products added up
// in float32, the fourth being below their rounding: scores to about 2^-21 of the largest terms, in
// an order of sums of their own (a tile and a window are told apart by the read map, contract C). A
// row's scores follow from its query and the keys alone.
#pragma once

#include <string>

#include "cuda/ops/qsa_select.h"

namespace strata {

// Whether the call's sizes are those the kernel is made for; known from shapes alone.
bool ScoreTilesApply(const QsaSelectArgs& args);

// args.scores <- those of rows first..first+rows-1, for the blocks they see; rows that see no more
// than args.num_blocks may get none.
std::string ScoreTiles(const QsaSelectArgs& args, int first, int rows, cudaStream_t stream);

}  // namespace strata
