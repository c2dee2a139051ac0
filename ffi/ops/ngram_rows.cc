#include "ops/ngram_rows.h"

#include <cstring>
#include <vector>

#include "common/dequantize.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

// The table rows of every live row's heads: [num_live, W].
std::vector<int64_t> TableRows(const NgramRowsArgs& args) {
  const int64_t ngram_size = static_cast<int64_t>(args.multipliers.size());
  const int64_t num_heads = static_cast<int64_t>(args.sizes.size());
  const int64_t heads_per_ngram = num_heads / (ngram_size - 1);
  std::vector<int64_t> rows;
  rows.reserve(static_cast<size_t>(args.num_live * num_heads));
  for (int64_t t = 0; t < args.num_live; ++t) {
    const int32_t* tokens = args.tokens + t * ngram_size;
    uint64_t hash = static_cast<uint64_t>(tokens[0]) * static_cast<uint64_t>(args.multipliers[0]);
    for (int64_t j = 0; j < num_heads; ++j) {
      if (j % heads_per_ngram == 0) {
        const int64_t n = j / heads_per_ngram + 1;
        hash ^= static_cast<uint64_t>(tokens[n]) * static_cast<uint64_t>(args.multipliers[n]);
      }
      const uint64_t row = hash % static_cast<uint64_t>(args.sizes[j]);
      rows.push_back(args.offsets[j] + static_cast<int64_t>(row));
    }
  }
  return rows;
}

}  // namespace

std::string NgramRows(const NgramRowsArgs& args) {
  const int64_t num_heads = static_cast<int64_t>(args.sizes.size());
  const std::vector<int64_t> rows = TableRows(args);
  const int64_t count = static_cast<int64_t>(rows.size());
  std::vector<uint8_t> bytes(static_cast<size_t>(count * args.table->row_bytes()));
  const std::string wrong = args.table->ReadRows(rows.data(), count, bytes.data());
  if (!wrong.empty()) return wrong;
  const int64_t width = args.table->num_cols();
  const Matrix matrix = {bytes.data(), args.table->type(), 1, count, width, count};
  const auto body = [&](int64_t t) {
    for (int64_t i = t * num_heads; i < (t + 1) * num_heads; ++i) {
      DequantizeRow(matrix, i, args.out + i * width);
    }
  };
  ThreadPool::Global().Run(args.num_live, body);
  std::memset(args.out + count * width, 0,
              (args.num_rows - args.num_live) * num_heads * width * sizeof(float));
  return "";
}

}  // namespace strata
