#include "ops/quant_matmul.h"

#include <algorithm>
#include <cstring>

#include "common/products.h"
#include "common/thread_pool.h"

namespace strata {

void QuantMatmul(const QuantMatmulArgs& args) {
  int64_t num_columns = 0;
  int64_t num_panels = 0;
  bool quantised = false;
  for (const Matrix* matrix : args.matrices) {
    num_columns += matrix->rows;
    num_panels += NumPanels(matrix->rows);
    quantised = quantised || matrix->type->form != Form::kFloat;
  }
  ThreadPool& pool = ThreadPool::Global();
  // One per calling thread: XLA may run calls of two programs at once.
  thread_local QuantizedRows shared_rows;
  QuantizedRows& rows = shared_rows;
  rows.Reset(args.x, args.num_live, args.width, quantised);
  if (quantised) {
    // Few rows are quantised faster than a helper is told of them.
    if (args.num_live * args.width < 16384) {
      for (int64_t t = 0; t < args.num_live; ++t) rows.QuantizeRow(t);
    } else {
      pool.Run(args.num_live, [&](int64_t t) { rows.QuantizeRow(t); });
    }
  }
  const Activations x = rows.View();
  const auto multiply = [&](int64_t panel) {
    int64_t column = 0;
    for (const Matrix* matrix : args.matrices) {
      const int64_t count = NumPanels(matrix->rows);
      if (panel < count) {
        const int64_t first = panel * kPanelRows;
        return MultiplyPanel(*matrix, matrix->bytes, first, x, args.num_live,
                             args.y + column + first, num_columns);
      }
      panel -= count;
      column += matrix->rows;
    }
  };
  pool.Run(num_panels, multiply);
  std::memset(args.y + args.num_live * num_columns, 0,
              (args.num_rows - args.num_live) * num_columns * sizeof(float));
}

}  // namespace strata
