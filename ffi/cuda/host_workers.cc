#include "cuda/host_workers.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/numerics.h"
#include "cuda/will_need.h"

namespace strata {
namespace {

using Clock = std::chrono::steady_clock;

// Panels of a run: long enough for the way to memory to count little, short enough for all threads
// to end together.
constexpr int64_t kRounds = 16;  // of a measurement
constexpr int64_t kGateRun = 2;
constexpr int64_t kDownRun = 8;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Asks for a panel of 16 rows.
void AskFor(const Matrix& shape, const uint8_t* bytes, int64_t panel) {
  const int64_t first = panel * kPanelRows;
  const uint8_t* begin = bytes + first * shape.row_bytes();
  const uint8_t* end =
      begin + std::min<int64_t>(kPanelRows, shape.rows - first) * shape.row_bytes();
  for (const uint8_t* at = begin; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

bool Quantised(const Matrix& matrix) { return matrix.type->form != Form::kFloat; }

}  // namespace

HostWorkers::HostWorkers(Mailbox* box, float* rows, const MailboxSizes& sizes,
                         std::vector<HostLayer> layers, std::vector<ExpertBytes> experts,
                         std::vector<bool> in_file, int num_threads)
    : box_(box),
      rows_(rows),
      sizes_(sizes),
      layers_(std::move(layers)),
      experts_(std::move(experts)),
      in_file_(std::move(in_file)),
      num_experts_(static_cast<int64_t>(experts_.size() / layers_.size())) {
  const int64_t most = int64_t{sizes.window_rows} * sizes.num_active;
  int64_t hidden = 0;
  for (const HostLayer& layer : layers_) {
    matrices_.push_back({&layer.gate, &layer.up, &layer.down});
    hidden = std::max(hidden, layer.gate.rows);
  }
  sorted_.reserve(most);
  groups_ = std::make_unique<Group[]>(most);
  work_.token_of.resize(most);
  work_.hidden.resize(most * hidden);
  identity_.resize(most);
  std::iota(identity_.begin(), identity_.end(), 0);
  pool_ = std::make_unique<ThreadPool>(num_threads, Poller::kLinger);
  poller_ = std::make_unique<Poller>(box, [this](uint64_t epoch) { Answer(epoch); });
}

void HostWorkers::Answer(uint64_t epoch) {
  const auto begin = Clock::now();
  {
    const std::lock_guard<std::mutex> turn(turn_);
    const unsigned char* letter = box_->letters + epoch % 2 * sizes_.letter_bytes;
    const auto* head = reinterpret_cast<const Letter*>(letter);
    Gather(head->layer, head->num_live, head->masks,
           reinterpret_cast<const int32_t*>(letter + sizes_.ids_at));
    Compute(head->layer, reinterpret_cast<const float*>(letter + sizes_.x_at), head->num_live,
            rows_ + epoch % 2 * sizes_.row_floats);
  }
  entries_.fetch_add(static_cast<int64_t>(sorted_.size()), std::memory_order_relaxed);
  busy_us_.fetch_add(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count(),
      std::memory_order_relaxed);
}

void HostWorkers::Gather(int64_t layer, int64_t num_live, const uint32_t* masks,
                         const int32_t* ids) {
  sorted_.clear();
  for (int64_t row = 0; row < num_live; ++row) {
    for (uint32_t left = masks[row]; left != 0; left &= left - 1) {
      const auto place = static_cast<int32_t>(row * sizes_.num_active + __builtin_ctz(left));
      sorted_.push_back({ids[place], place});
    }
  }
  std::sort(sorted_.begin(), sorted_.end(), [](const Entry& a, const Entry& b) {
    return a.expert != b.expert ? a.expert < b.expert : a.place < b.place;
  });
  const auto count = static_cast<int64_t>(sorted_.size());
  num_groups_ = 0;
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    while (end < count && sorted_[end].expert == sorted_[begin].expert) ++end;
    Group& group = groups_[num_groups_++];
    group.matrices = &matrices_[layer];
    const int64_t index = layer * num_experts_ + sorted_[begin].expert;
    group.bytes = experts_[index];
    if (in_file_[index]) {
      WillNeed(layers_[layer].gate, layers_[layer].up, layers_[layer].down, group.bytes);
    }
    group.begin = begin;
    group.end = end;
  }
  for (int64_t e = 0; e < count; ++e) work_.token_of[e] = sorted_[e].place / sizes_.num_active;
}

void HostWorkers::Compute(int64_t layer, const float* x, int64_t num_rows, float* out) {
  const HostLayer& m = layers_[layer];
  work_.hidden_width = m.gate.rows;
  work_.inputs.Reset(x, num_rows, sizes_.width, Quantised(m.gate) || Quantised(m.up));
  work_.hidden_rows.Reset(work_.hidden.data(), static_cast<int64_t>(sorted_.size()), m.gate.rows,
                          Quantised(m.down));
  if (work_.inputs.quantised()) {
    std::vector<bool> done(num_rows);
    for (size_t e = 0; e < sorted_.size(); ++e) {
      const int32_t row = work_.token_of[e];
      if (!done[row]) work_.inputs.QuantizeRow(row);
      done[row] = true;
    }
  }
  gate_runs_ = (NumPanels(m.gate.rows) + kGateRun - 1) / kGateRun;
  down_runs_ = (NumPanels(m.down.rows) + kDownRun - 1) / kDownRun;
  for (int64_t g = 0; g < num_groups_; ++g) {
    groups_[g].left.store(gate_runs_, std::memory_order_relaxed);
    groups_[g].ready.store(false, std::memory_order_relaxed);
  }
  pool_->Run(num_groups_ * (gate_runs_ + down_runs_), [&](int64_t job) { RunJob(job, out); }, 1);
}

void HostWorkers::RunJob(int64_t job, float* out) {
  if (poller_->Aborted()) return;
  if (const int64_t gates = num_groups_ * gate_runs_; job >= gates) {
    RunDown(groups_[(job - gates) / down_runs_], (job - gates) % down_runs_, out);
  } else {
    RunGateUp(groups_[job / gate_runs_], job % gate_runs_);
  }
  poller_->Beat();
}

void HostWorkers::RunGateUp(Group& group, int64_t run) {
  const FfnMatrices& m = *group.matrices;
  const int64_t first = run * kGateRun;
  AskFor(*m.gate, group.bytes.gate, first);
  AskFor(*m.up, group.bytes.up, first);
  const int64_t end = std::min(first + kGateRun, NumPanels(m.gate->rows));
  for (int64_t panel = first; panel < end; ++panel) GateUpPanel(group, panel, work_);
  if (group.left.fetch_sub(1) != 1) return;
  if (work_.hidden_rows.quantised()) {
    for (int64_t e = group.begin; e < group.end; ++e) work_.hidden_rows.QuantizeRow(e);
  }
  group.ready.store(true);
}

void HostWorkers::RunDown(const Group& group, int64_t run, float* out) {
  const FfnMatrices& m = *group.matrices;
  AskFor(*m.down, group.bytes.down, run * kDownRun);
  while (!group.ready.load()) {
    if (poller_->Aborted()) return;
    Pause();
  }
  const int64_t rows = m.down->rows;
  const int64_t end = std::min((run + 1) * kDownRun, NumPanels(rows));
  alignas(64) float sums[kMostLetterRows * kPanelRows];
  for (int64_t panel = run * kDownRun; panel < end; ++panel) {
    DownPanel(group, panel, work_, identity_.data(), sums, kPanelRows);
    const int64_t first = panel * kPanelRows;
    const auto columns = static_cast<size_t>(std::min<int64_t>(kPanelRows, rows - first));
    for (int64_t e = group.begin; e < group.end; ++e) {
      std::memcpy(out + int64_t{sorted_[e].place} * sizes_.width + first,
                  sums + (e - group.begin) * kPanelRows, columns * sizeof(float));
    }
  }
}

double HostWorkers::SecondsPerExpert(int64_t layer, int64_t count) {
  const std::lock_guard<std::mutex> turn(turn_);
  std::vector<int32_t> all;
  for (int64_t e = 0; e < num_experts_; ++e) {
    if (experts_[layer * num_experts_ + e].gate != nullptr) all.push_back(static_cast<int32_t>(e));
  }
  count = std::min<int64_t>({count, sizes_.num_active, static_cast<int64_t>(all.size())});
  if (count < 1) return 0.0;
  const std::vector<float> x(sizes_.width, 1.0f);
  std::vector<float> out(sizes_.row_floats);
  const auto mask = static_cast<uint32_t>((uint64_t{1} << count) - 1);
  std::vector<double> times;
  for (int64_t round = 0; round < kRounds; ++round) {
    std::vector<int32_t> ids(count);
    for (int64_t i = 0; i < count; ++i) ids[i] = all[(round * count + i) % all.size()];
    const auto begin = Clock::now();
    Gather(layer, 1, &mask, ids.data());
    Compute(layer, x.data(), 1, out.data());
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2] / static_cast<double>(count);
}

}  // namespace strata
