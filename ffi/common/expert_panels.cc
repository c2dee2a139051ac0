#include "common/expert_panels.h"

#include <algorithm>

namespace strata {
namespace {

constexpr int64_t kRowsAtOnce = 64;  // bounds the stack buffers of a gate/up panel

}  // namespace

void GateUpPanel(const FfnGroup& group, int64_t panel, FfnRows& rows) {
  alignas(64) float gate[kRowsAtOnce * kPanelRows];
  alignas(64) float up[kRowsAtOnce * kPanelRows];
  const FfnMatrices& m = *group.matrices;
  const int64_t first = panel * kPanelRows;
  const int64_t columns = std::min<int64_t>(kPanelRows, m.gate->rows - first);
  for (int64_t begin = group.begin; begin < group.end; begin += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, group.end - begin);
    const Activations x = rows.inputs.View(rows.token_of.data() + begin);
    MultiplyPanel(*m.gate, group.bytes.gate, first, x, count, gate, kPanelRows);
    MultiplyPanel(*m.up, group.bytes.up, first, x, count, up, kPanelRows);
    for (int64_t i = 0; i < count; ++i) {
      ActiveKernels().silu_mul(gate + i * kPanelRows, up + i * kPanelRows, columns,
                               rows.hidden.data() + (begin + i) * rows.hidden_width + first);
    }
  }
}

void DownPanel(const FfnGroup& group, int64_t panel, const FfnRows& rows, const int32_t* identity,
               float* y, int64_t stride) {
  const Activations h = rows.hidden_rows.View(identity + group.begin);
  MultiplyPanel(*group.matrices->down, group.bytes.down, panel * kPanelRows, h,
                group.end - group.begin, y, stride);
}

}  // namespace strata
