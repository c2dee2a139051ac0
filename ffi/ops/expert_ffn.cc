#include "ops/expert_ffn.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "common/products.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

// Rows that share one set of matrices: entries [begin, end) of the sorted order.
struct Group {
  const FfnMatrices* matrices;
  int64_t expert;
  int64_t begin;
  int64_t end;
};

// Everything a call needs beside its arguments; kept from call to call.
struct Workspace {
  std::vector<Group> groups;
  std::vector<int64_t> first_job;   // of each group, and the total
  std::vector<int32_t> token_of;    // [entries] sorted by expert; the shared expert's rows last
  std::vector<int32_t> place_of;    // [T * A] entry -> place in the sorted order
  std::vector<int32_t> identity;
  std::vector<float> hidden;        // [entries, F]
  std::vector<float> rows;          // [entries, D]
  QuantizedRows inputs;
  QuantizedRows hidden_rows;
};

constexpr int64_t kRowsAtOnce = 64;  // bounds the stack buffers of a gate/up panel

void SortByExpert(const ExpertFfnArgs& args, Workspace& work) {
  const int64_t entries = args.num_live * args.num_active;
  const int64_t num_experts = args.routed.gate->count;
  std::vector<int64_t> next(num_experts + 1, 0);
  for (int64_t e = 0; e < entries; ++e) ++next[args.ids[e] + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  work.groups.clear();
  for (int64_t e = 0; e < num_experts; ++e) {
    if (next[e + 1] > next[e]) work.groups.push_back({&args.routed, e, next[e], next[e + 1]});
  }
  work.groups.push_back({&args.shared, 0, entries, entries + args.num_live});
  work.token_of.resize(entries + args.num_live);
  work.place_of.resize(entries);
  for (int64_t e = 0; e < entries; ++e) {
    const int64_t place = next[args.ids[e]]++;
    work.place_of[e] = static_cast<int32_t>(place);
    work.token_of[place] = static_cast<int32_t>(e / args.num_active);
  }
  std::iota(work.token_of.begin() + entries, work.token_of.end(), 0);
  const size_t before = work.identity.size();
  if (before < work.token_of.size()) {
    work.identity.resize(work.token_of.size());
    std::iota(work.identity.begin(), work.identity.end(), 0);
  }
}

// Runs body(group, panel) for every panel of every group, `rows` telling a group's number of weight rows.
void ForEachPanel(Workspace& work, const std::function<int64_t(const Group&)>& rows,
                  const std::function<void(const Group&, int64_t)>& body) {
  work.first_job.assign(1, 0);
  for (const Group& group : work.groups) {
    work.first_job.push_back(work.first_job.back() + NumPanels(rows(group)));
  }
  ThreadPool::Global().Run(work.first_job.back(), [&](int64_t job) {
    const auto after = std::upper_bound(work.first_job.begin(), work.first_job.end(), job);
    const int64_t g = after - work.first_job.begin() - 1;
    body(work.groups[g], job - work.first_job[g]);
  });
}

void GateUpPanel(const Group& group, int64_t panel, int64_t stride, Workspace& work) {
  alignas(64) float gate[kRowsAtOnce * kPanelRows];
  alignas(64) float up[kRowsAtOnce * kPanelRows];
  const FfnMatrices& m = *group.matrices;
  const int64_t first = panel * kPanelRows;
  const int64_t columns = std::min<int64_t>(kPanelRows, m.gate->rows - first);
  for (int64_t begin = group.begin; begin < group.end; begin += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, group.end - begin);
    const Activations x = work.inputs.View(work.token_of.data() + begin);
    MultiplyPanel(*m.gate, group.expert, first, x, count, gate, kPanelRows);
    MultiplyPanel(*m.up, group.expert, first, x, count, up, kPanelRows);
    for (int64_t i = 0; i < count; ++i) {
      ActiveKernels().silu_mul(gate + i * kPanelRows, up + i * kPanelRows, columns,
                               work.hidden.data() + (begin + i) * stride + first);
    }
  }
}

bool Quantised(const Matrix* matrix) { return matrix->type->form != Form::kFloat; }

}  // namespace

void ExpertFfn(const ExpertFfnArgs& args) {
  thread_local Workspace shared_work;
  Workspace& work = shared_work;  // the pool's threads must see this thread's
  ThreadPool& pool = ThreadPool::Global();
  SortByExpert(args, work);
  const int64_t entries = static_cast<int64_t>(work.token_of.size());
  // Both families of hidden rows lie at one stride, so that one quantiser serves them.
  const int64_t hidden_width = std::max(args.routed.gate->rows, args.shared.gate->rows);
  if (static_cast<int64_t>(work.hidden.size()) < entries * hidden_width) {
    work.hidden.resize(entries * hidden_width);
  }
  if (static_cast<int64_t>(work.rows.size()) < entries * args.width) {
    work.rows.resize(entries * args.width);
  }
  work.inputs.Reset(args.x, args.num_live, args.width,
                    Quantised(args.routed.gate) || Quantised(args.routed.up) ||
                        Quantised(args.shared.gate) || Quantised(args.shared.up));
  if (work.inputs.quantised()) {
    for (int64_t t = 0; t < args.num_live; ++t) work.inputs.QuantizeRow(t);
  }
  ForEachPanel(
      work, [](const Group& group) { return group.matrices->gate->rows; },
      [&](const Group& group, int64_t panel) { GateUpPanel(group, panel, hidden_width, work); });
  work.hidden_rows.Reset(work.hidden.data(), entries, hidden_width,
                         Quantised(args.routed.down) || Quantised(args.shared.down));
  if (work.hidden_rows.quantised()) {
    constexpr int64_t kRows = 16;  // a job of a single row would cost more to hand out than to do
    pool.Run((entries + kRows - 1) / kRows, [&](int64_t job) {
      for (int64_t i = job * kRows; i < std::min(entries, (job + 1) * kRows); ++i) {
        work.hidden_rows.QuantizeRow(i);
      }
    });
  }
  ForEachPanel(
      work, [](const Group& group) { return group.matrices->down->rows; },
      [&](const Group& group, int64_t panel) {
        const Activations h = work.hidden_rows.View(work.identity.data() + group.begin);
        MultiplyPanel(*group.matrices->down, group.expert, panel * kPanelRows, h,
                      group.end - group.begin,
                      work.rows.data() + group.begin * args.width + panel * kPanelRows, args.width);
      });
  const int64_t routed = args.num_live * args.num_active;
  const auto combine = [&](int64_t t) {
    float* y = args.y + t * args.width;
    std::memset(y, 0, args.width * sizeof(float));
    for (int64_t a = 0; a < args.num_active; ++a) {
      const int64_t e = t * args.num_active + a;
      ActiveKernels().accumulate(args.weights[e], work.rows.data() + work.place_of[e] * args.width,
                                 args.width, y);
    }
    ActiveKernels().accumulate(args.shared_weights[t], work.rows.data() + (routed + t) * args.width,
                               args.width, y);
  };
  pool.Run(args.num_live, combine);
  std::memset(args.y + args.num_live * args.width, 0,
              (args.num_rows - args.num_live) * args.width * sizeof(float));
}

}  // namespace strata
