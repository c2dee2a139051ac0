// ngram_ask: tells the host, at the beginning of a step, which rows of the n-gram table the step's
// ngram_rows will want (table_mailbox.h), so that it reads them while the layers before work.
//
// The ids pass through unchanged, in place: what is computed from them comes after the question.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"
#include "cuda/ops/ngram_hash.h"
#include "cuda/table_mailbox.h"

namespace strata {

struct NgramAskArgs {
  const int32_t* tokens;  // [T, N]   newest first
  const int32_t* live;    // one number
  int32_t num_rows;       // T
  TableMailboxAt mailbox;
  NgramHash hash;
};

std::string NgramAsk(const NgramAskArgs& args, cudaStream_t stream);

}  // namespace strata
