#include "ops/expert_ffn.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <vector>

#include "common/products.h"
#include "common/thread_pool.h"

namespace strata {
namespace {

// Entries of the sorted order that share an expert.
struct Group : FfnGroup {
  int64_t expert;
  int64_t first_entry;  // of the router's order: when this expert was first asked for
};

// Everything a call needs beside its arguments; kept from call to call. Owned jointly with the tier
// workers' jobs, so that a worker which misses its time-out touches no memory of the caller: its
// rows come from here and go here, the matrices' shapes are the store's, which the tiers hold, and
// the bytes stay where they are for the sake of the job's own Reader.
struct Workspace : FfnRows {  // token_of: sorted by expert; the shared expert's rows last
  std::vector<Group> groups;  // of the routed experts by id, then the shared expert
  std::vector<Group> primary, peer, stream, host, file;
  std::vector<int32_t> place_of;  // [T * A] entry -> place in the sorted order
  std::vector<int32_t> identity;
  std::vector<float> own_x;  // [T, D] where a worker reads floats
  std::vector<float> rows;   // [entries, D]
  FfnMatrices routed, shared;
  int64_t width;
};

void SortByExpert(const ExpertFfnArgs& args, Workspace& work) {
  const int64_t entries = args.num_live * args.num_active;
  const int64_t num_experts = args.routed.gate->count;
  std::vector<int64_t> next(num_experts + 1, 0);
  std::vector<int64_t> first_entry(num_experts, entries);
  for (int64_t e = 0; e < entries; ++e) {
    ++next[args.ids[e] + 1];
    first_entry[args.ids[e]] = std::min(first_entry[args.ids[e]], e);
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  work.groups.clear();
  for (int64_t e = 0; e < num_experts; ++e) {
    if (next[e + 1] == next[e]) continue;
    const ExpertBytes home = {args.routed.gate->Row(e, 0), args.routed.up->Row(e, 0),
                              args.routed.down->Row(e, 0)};
    work.groups.push_back({{&work.routed, home, next[e], next[e + 1]}, e, first_entry[e]});
  }
  work.token_of.resize(entries + args.num_live);
  work.place_of.resize(entries);
  for (int64_t e = 0; e < entries; ++e) {
    const int64_t place = next[args.ids[e]]++;
    work.place_of[e] = static_cast<int32_t>(place);
    work.token_of[place] = static_cast<int32_t>(e / args.num_active);
  }
  std::iota(work.token_of.begin() + entries, work.token_of.end(), 0);
  if (work.identity.size() < work.token_of.size()) {
    work.identity.resize(work.token_of.size());
    std::iota(work.identity.begin(), work.identity.end(), 0);
  }
}

// The last misses in the router's order up to the streamed share become the primary's.
void StreamShare(ExpertTiers& tiers, int64_t layer, Workspace& work) {
  const double share = tiers.options().stream_share;
  const auto misses = static_cast<int64_t>(work.host.size());
  const auto count = static_cast<int64_t>(static_cast<double>(misses) * share);
  if (count == 0) return;
  std::stable_sort(work.host.begin(), work.host.end(),
                   [](const Group& a, const Group& b) { return a.first_entry < b.first_entry; });
  for (int64_t i = 0; i < count; ++i) {
    const Group group = work.host.back();
    work.host.pop_back();
    tiers.counters().entries_host -= group.end - group.begin;
    tiers.counters().entries_stream += group.end - group.begin;
    tiers.counters().bytes_streamed += tiers.ExpertSize(layer);
    work.stream.push_back(group);
  }
}

// Splits the groups among the tiers: disjoint and complete, each expert where its word says.
void PlanTiers(ExpertTiers& tiers, int64_t layer, Workspace& work) {
  for (auto* groups : {&work.primary, &work.peer, &work.stream, &work.host, &work.file}) {
    groups->clear();
  }
  TierCounters& counters = tiers.counters();
  for (Group group : work.groups) {
    const int64_t entries = group.end - group.begin;
    tiers.Count(layer, group.expert, entries);
    const Residence residence = tiers.Find(layer, group.expert);
    switch (residence.tier) {
      case Tier::kPrimary:
        group.bytes = tiers.InSlot(layer, residence);
        counters.entries_primary += entries;
        work.primary.push_back(group);
        break;
      case Tier::kPeer:
        group.bytes = tiers.InSlot(layer, residence);
        counters.entries_peer += entries;
        work.peer.push_back(group);
        break;
      case Tier::kHost:
        counters.entries_host += entries;
        work.host.push_back(group);
        break;
      case Tier::kFile:
        counters.entries_file += entries;
        work.file.push_back(group);
        break;
    }
  }
  StreamShare(tiers, layer, work);
}

// Runs body(group, panel) for every panel of every group, `rows` telling a group's number of weight
// rows.
void ForEachPanel(ThreadPool& pool, std::span<const Group> groups,
                  const std::function<int64_t(const Group&)>& rows,
                  const std::function<void(const Group&, int64_t)>& body) {
  std::vector<int64_t> first_job(1, 0);
  for (const Group& group : groups) first_job.push_back(first_job.back() + NumPanels(rows(group)));
  pool.Run(first_job.back(), [&](int64_t job) {
    const auto after = std::upper_bound(first_job.begin(), first_job.end(), job);
    const int64_t g = after - first_job.begin() - 1;
    body(groups[g], job - first_job[g]);
  });
}

// One tier's groups from activations to rows. Groups write disjoint rows, so tiers may run side by
// side. `worker` is whose job it is: null for the caller's own.
void RunGroups(ThreadPool& pool, std::span<const Group> groups, Workspace& work,
               TierWorker* worker = nullptr) {
  if (groups.empty()) return;
  ForEachPanel(
      pool, groups, [](const Group& group) { return group.matrices->gate->rows; },
      [&](const Group& group, int64_t panel) {
        const TierWorker::Step step(worker);
        if (step.wanted()) GateUpPanel(group, panel, work);
      });
  if (work.hidden_rows.quantised()) {
    // A job of a single row would cost more to hand out than to do.
    pool.Run(static_cast<int64_t>(groups.size()), [&](int64_t g) {
      const TierWorker::Step step(worker);
      for (int64_t i = groups[g].begin; i < groups[g].end; ++i) work.hidden_rows.QuantizeRow(i);
    });
  }
  ForEachPanel(
      pool, groups, [](const Group& group) { return group.matrices->down->rows; },
      [&](const Group& group, int64_t panel) {
        const TierWorker::Step step(worker);
        if (!step.wanted()) return;
        DownPanel(group, panel, work, work.identity.data(),
                  work.rows.data() + group.begin * work.width + panel * kPanelRows, work.width);
      });
}

// What the primary has, with as many streamed experts as there are slots for copies; then the rest
// of those in rounds.
void RunPrimary(ExpertTiers& tiers, int64_t layer, Workspace& work) {
  const auto streamed = static_cast<int64_t>(work.stream.size());
  int64_t next = 0;
  do {
    for (int64_t slot = 0; slot < tiers.options().stream_slots && next < streamed; ++slot, ++next) {
      Group& group = work.stream[next];
      group.bytes = tiers.CopyTo(layer, group.expert, tiers.Staging(slot));
      work.primary.push_back(group);
    }
    RunGroups(ThreadPool::Global(), work.primary, work);
    work.primary.clear();
  } while (next < streamed);
}

// File-tier experts are read into memory one after the other, and their pages given back.
void RunFileGroups(ExpertTiers& tiers, int64_t layer, Workspace& work) {
  for (Group& group : work.file) {
    group.bytes = tiers.CopyTo(layer, group.expert, tiers.Staging(tiers.options().stream_slots));
    tiers.Forget(layer, group.expert);
    tiers.counters().bytes_read += tiers.ExpertSize(layer);
    RunGroups(ThreadPool::Global(), {&group, 1}, work);
  }
}

void Combine(const ExpertFfnArgs& args, const Workspace& work) {
  const int64_t routed = args.num_live * args.num_active;
  ThreadPool::Global().Run(args.num_live, [&](int64_t t) {
    float* y = args.y + t * args.width;
    std::memset(y, 0, args.width * sizeof(float));
    for (int64_t a = 0; a < args.num_active; ++a) {
      const int64_t e = t * args.num_active + a;
      ActiveKernels().accumulate(args.weights[e], work.rows.data() + work.place_of[e] * args.width,
                                 args.width, y);
    }
    ActiveKernels().accumulate(args.shared_weights[t], work.rows.data() + (routed + t) * args.width,
                               args.width, y);
  });
  std::memset(args.y + args.num_live * args.width, 0,
              (args.num_rows - args.num_live) * args.width * sizeof(float));
}

bool Quantised(const Matrix* matrix) { return matrix->type->form != Form::kFloat; }

void MakeRoom(const ExpertFfnArgs& args, Workspace& work) {
  const auto entries = static_cast<int64_t>(work.token_of.size());
  // Both families of hidden rows lie at one stride, so that one quantiser serves them.
  work.hidden_width = std::max(args.routed.gate->rows, args.shared.gate->rows);
  work.width = args.width;
  const auto grow = [](std::vector<float>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  };
  grow(work.hidden, entries * work.hidden_width);
  grow(work.rows, entries * args.width);
  const float* x = args.x;
  const bool has_floats = !Quantised(args.routed.gate) || !Quantised(args.routed.up);
  if (has_floats && args.tiers != nullptr && (args.tiers->peer() || args.tiers->host())) {
    work.own_x.assign(x, x + args.num_live * args.width);
    x = work.own_x.data();
  }
  work.inputs.Reset(x, args.num_live, args.width,
                    Quantised(args.routed.gate) || Quantised(args.routed.up) ||
                        Quantised(args.shared.gate) || Quantised(args.shared.up));
  work.hidden_rows.Reset(work.hidden.data(), entries, work.hidden_width,
                         Quantised(args.routed.down) || Quantised(args.shared.down));
  if (work.inputs.quantised()) {
    for (int64_t t = 0; t < args.num_live; ++t) work.inputs.QuantizeRow(t);
  }
}

// A worker's job: the layer's words and the bytes they name stay as they are until it is done.
void Launch(TierWorker* worker, const ExpertFfnArgs& args, const std::shared_ptr<Workspace>& work,
            std::vector<Group> Workspace::* groups) {
  const auto reader = std::make_shared<const ExpertTiers::Reader>(*args.tiers, args.layer);
  worker->Launch([work, groups, worker, reader](ThreadPool& pool) {
    RunGroups(pool, (*work).*groups, *work, worker);
  });
}

// Waits for a worker and counts the time; false if it did not answer.
bool Join(TierWorker* worker, std::chrono::milliseconds timeout, ExpertTiers& tiers) {
  const auto start = std::chrono::steady_clock::now();
  const bool done = worker->Finish(timeout);
  const auto waited = std::chrono::steady_clock::now() - start;
  tiers.counters().waits_us +=
      std::chrono::duration_cast<std::chrono::microseconds>(waited).count();
  return done;
}

std::string Silence(bool peer, std::chrono::milliseconds timeout) {
  return std::string(peer ? "the peer's worker" : "the host's workers") +
         " gave no sign of life for " + std::to_string(timeout.count()) +
         " ms; open the model again, and if that does not help do without " +
         (peer ? "the peer (--peer_device=-1)" : "them (--pool_workers=0)");
}

// Waits for both workers; returns which did not answer, or an empty string. What a job threw goes
// on from here, when no worker is busy.
std::string JoinAll(ExpertTiers& tiers, bool on_peer, bool on_host) {
  const auto timeout = tiers.options().timeout;
  std::string silent;
  if (on_peer && !Join(tiers.peer(), timeout, tiers)) silent = Silence(true, timeout);
  // Where one is lost already, the other is not waited for.
  const auto left = silent.empty() ? timeout : std::chrono::milliseconds(0);
  const bool host_done = !on_host || Join(tiers.host(), left, tiers);
  if (silent.empty() && !host_done) silent = Silence(false, timeout);
  if (!silent.empty()) {
    tiers.Fail(silent);
    return silent;
  }
  for (TierWorker* worker : {on_peer ? tiers.peer() : nullptr, on_host ? tiers.host() : nullptr}) {
    if (worker == nullptr) continue;
    if (const std::exception_ptr error = worker->TakeError()) std::rethrow_exception(error);
  }
  return "";
}

std::string RunTiers(const ExpertFfnArgs& args, const std::shared_ptr<Workspace>& work) {
  ExpertTiers& tiers = *args.tiers;
  const bool on_peer = !work->peer.empty();
  const bool on_host = tiers.host() != nullptr && !work->host.empty();
  std::exception_ptr error;
  if (on_peer) Launch(tiers.peer(), args, work, &Workspace::peer);
  try {
    if (on_host) Launch(tiers.host(), args, work, &Workspace::host);
    if (!on_host) work->primary.insert(work->primary.end(), work->host.begin(), work->host.end());
    RunPrimary(tiers, args.layer, *work);
    RunFileGroups(tiers, args.layer, *work);
    if (args.layer + 1 < tiers.num_layers()) tiers.ReadAhead(args.layer + 1, args.num_active);
  } catch (...) {
    error = std::current_exception();  // the workers come home first
  }
  const std::string silent = JoinAll(tiers, on_peer, on_host);
  if (silent.empty() && error) std::rethrow_exception(error);
  return silent;
}

std::string RunOnTiers(const ExpertFfnArgs& args, const Group& shared,
                       std::shared_ptr<Workspace>& held) {
  const std::shared_ptr<Workspace> work = held;
  const ExpertTiers::Reader reader(*args.tiers, args.layer);
  args.tiers->Record(args.layer, args.ids, args.num_live, args.num_active);
  PlanTiers(*args.tiers, args.layer, *work);
  MakeRoom(args, *work);
  work->primary.push_back(shared);
  const std::string silent = RunTiers(args, work);
  if (!silent.empty()) held = std::make_shared<Workspace>();  // the late worker keeps the old one
  return silent;
}

}  // namespace

std::string ExpertFfn(const ExpertFfnArgs& args) {
  thread_local std::shared_ptr<Workspace> held = std::make_shared<Workspace>();
  const std::shared_ptr<Workspace> work = held;  // the pool's threads must see this thread's
  std::unique_lock<std::mutex> turn;
  if (args.tiers != nullptr) {
    turn = std::unique_lock<std::mutex>(args.tiers->turn());
    if (args.tiers->failed()) return "refused: " + args.tiers->failure();
  }
  work->routed = args.routed;
  work->shared = args.shared;
  SortByExpert(args, *work);
  const int64_t routed = args.num_live * args.num_active;
  const ExpertBytes bytes = {args.shared.gate->bytes, args.shared.up->bytes,
                             args.shared.down->bytes};
  const Group shared = {{&work->shared, bytes, routed, routed + args.num_live}, 0, routed};
  if (args.tiers == nullptr) {
    MakeRoom(args, *work);
    work->groups.push_back(shared);
    RunGroups(ThreadPool::Global(), work->groups, *work);
  } else {
    const std::string silent = RunOnTiers(args, shared, held);
    if (!silent.empty()) return silent;
  }
  Combine(args, *work);
  return "";
}

}  // namespace strata
