#include "ops/embed_rows.h"

#include <cstring>

#include "common/dequantize.h"
#include "common/thread_pool.h"

namespace strata {

void EmbedRows(const EmbedRowsArgs& args) {
  const int64_t width = args.table->cols;
  const auto body = [&](int64_t t) {
    DequantizeRow(*args.table, args.ids[t], args.out + t * width);
  };
  ThreadPool::Global().Run(args.num_live, body);
  std::memset(args.out + args.num_live * width, 0,
              (args.num_rows - args.num_live) * width * sizeof(float));
}

}  // namespace strata
