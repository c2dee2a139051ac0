#include "ops/ngram_rows.h"

#include <cstring>

#include "common/dequantize.h"
#include "common/thread_pool.h"

namespace strata {

void NgramRows(const NgramRowsArgs& args) {
  const int64_t ngram_size = static_cast<int64_t>(args.multipliers.size());
  const int64_t num_heads = static_cast<int64_t>(args.sizes.size());
  const int64_t heads_per_ngram = num_heads / (ngram_size - 1);
  const int64_t width = args.table->cols;
  const auto body = [&](int64_t t) {
    const int32_t* tokens = args.tokens + t * ngram_size;
    float* out = args.out + t * num_heads * width;
    uint64_t hash = static_cast<uint64_t>(tokens[0]) * static_cast<uint64_t>(args.multipliers[0]);
    for (int64_t j = 0; j < num_heads; ++j) {
      if (j % heads_per_ngram == 0) {
        const int64_t n = j / heads_per_ngram + 1;
        hash ^= static_cast<uint64_t>(tokens[n]) * static_cast<uint64_t>(args.multipliers[n]);
      }
      const int64_t row = static_cast<int64_t>(hash % static_cast<uint64_t>(args.sizes[j]));
      DequantizeRow(*args.table, args.offsets[j] + row, out + j * width);
    }
  };
  ThreadPool::Global().Run(args.num_live, body);
  std::memset(args.out + args.num_live * num_heads * width, 0,
              (args.num_rows - args.num_live) * num_heads * width * sizeof(float));
}

}  // namespace strata
