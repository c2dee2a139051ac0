// The library's one list: every XLA target, and the small control surface that Python holds.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "common/panel.h"
#include "common/thread_pool.h"
#include "ops/handlers.h"
#include "weights/expert_tiers.h"
#include "weights/ngram_table_bind.h"
#include "weights/weight_store.h"

namespace strata {
namespace {

namespace py = pybind11;

// Python's name for a target is "strata.<op>"; the version is part of it because XLA's compilation
// cache does not see this library. Raise it when any op's results or arguments change.
constexpr const char* kTargetVersion = "3";

struct Target {
  const char* op;
  XLA_FFI_Handler* handler;
};

constexpr Target kTargets[] = {
    {"quant_matmul", QuantMatmulFfi}, {"expert_ffn", ExpertFfnFfi}, {"router_topk", RouterTopkFfi},
    {"embed_rows", EmbedRowsFfi},     {"ngram_rows", NgramRowsFfi}, {"gdn_window", GdnWindowFfi},
    {"qsa_append", QsaAppendFfi},     {"qsa_select", QsaSelectFfi}, {"qsa_attend", QsaAttendFfi},
    {"hyper_read", HyperReadFfi},     {"ngram_gate", NgramGateFfi},
};

py::dict Targets() {
  py::dict targets;
  for (const Target& target : kTargets) {
    targets[target.op] =
        py::capsule(reinterpret_cast<void*>(target.handler), "xla._CUSTOM_CALL_TARGET");
  }
  return targets;
}

// Python's hold on a WeightStore and its slot.
class StoreHandle {
 public:
  StoreHandle(int64_t num_roles, int64_t num_layers) {
    constexpr int64_t kMost = 1 << 20;
    if (num_roles < 1 || num_roles > kMost || num_layers < 1 || num_layers > kMost) {
      throw std::invalid_argument("weight_store: " + std::to_string(num_roles) + " roles and " +
                                  std::to_string(num_layers) + " layers, expected 1 to " +
                                  std::to_string(kMost));
    }
    store_ = std::make_shared<WeightStore>(num_roles, num_layers);
    slot_ = AddStore(store_);
  }
  ~StoreHandle() { Close(); }

  int64_t slot() const { return slot_; }
  const std::shared_ptr<WeightStore>& store() const { return store_; }

  void Put(int64_t role, int64_t layer, int64_t type, int64_t count, int64_t rows, int64_t cols,
           int64_t stride, uintptr_t address, int64_t num_bytes) {
    Matrix matrix;
    matrix.bytes = reinterpret_cast<const uint8_t*>(address);
    matrix.type = FindType(type);
    if (matrix.type == nullptr) {
      throw std::invalid_argument("weight_store: type " + std::to_string(type) + " is unknown");
    }
    matrix.count = count;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.stride = stride;
    const std::string error = store_->Put(role, layer, matrix, num_bytes);
    if (!error.empty()) throw std::invalid_argument("weight_store: " + error);
  }

  void Close() {
    if (slot_ >= 0) RemoveStore(slot_);
    slot_ = -1;
  }

 private:
  std::shared_ptr<WeightStore> store_;
  int64_t slot_ = -1;
};

// Python's hold on an ExpertTiers and its slot. Arrays are [layers, experts].
class TiersHandle {
 public:
  TiersHandle(const StoreHandle& store, const std::array<int64_t, 3>& roles, int64_t num_layers,
              int64_t primary_bytes, int64_t peer_bytes, int peer_threads, int host_threads,
              double stream_share, int64_t stream_slots, int64_t timeout_ms) {
    constexpr int64_t kMostSlots = 1 << 20, kMostMs = int64_t{1} << 40;
    if (stream_slots < 0 || stream_slots > kMostSlots || timeout_ms < 1 || timeout_ms > kMostMs) {
      throw std::invalid_argument(
          "expert_tiers: " + std::to_string(stream_slots) + " slots for copies and a time-out of " +
          std::to_string(timeout_ms) + " ms, expected 0 to " + std::to_string(kMostSlots) +
          " and 1 to " + std::to_string(kMostMs));
    }
    TierOptions options;
    options.primary_bytes = primary_bytes;
    options.peer_bytes = peer_bytes;
    options.peer_threads = peer_threads;
    options.host_threads = host_threads;
    options.stream_share = stream_share;
    options.stream_slots = stream_slots;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    tiers_ = std::make_shared<ExpertTiers>(store.store(), roles, num_layers, options);
    slot_ = AddTiers(tiers_);
  }
  ~TiersHandle() { Close(); }

  int64_t slot() const { return slot_; }

  // A hold of its own for every call: Close may come from another thread meanwhile.
  std::shared_ptr<ExpertTiers> Held() const {
    if (tiers_ == nullptr) throw std::invalid_argument("expert_tiers: the tiers are closed");
    return tiers_;
  }

  void Place(const py::array_t<uint8_t, py::array::c_style>& tiers,
             const py::array_t<int64_t, py::array::c_style>& offsets,
             const py::array_t<uint8_t, py::array::c_style>& homes) {
    const auto held = Held();
    const int64_t pairs = held->num_layers() * held->num_experts();
    if (tiers.size() != pairs || offsets.size() != pairs || homes.size() != pairs) {
      throw std::invalid_argument("expert_tiers: arrays of " + std::to_string(tiers.size()) +
                                  " experts, expected " + std::to_string(pairs));
    }
    const std::string error = held->Place(tiers.data(), offsets.data(), homes.data());
    if (!error.empty()) throw std::invalid_argument("expert_tiers: " + error);
  }

  int64_t Fill(int64_t first, int64_t count) {
    const auto held = Held();
    const py::gil_scoped_release release;
    return held->Fill(first, count);
  }

  int64_t Lock(const py::array_t<uint8_t, py::array::c_style>& wanted, int64_t first,
               int64_t count) {
    const auto held = Held();
    if (wanted.size() != held->num_layers() * held->num_experts()) {
      throw std::invalid_argument("expert_tiers: an array of " + std::to_string(wanted.size()) +
                                  " experts");
    }
    const uint8_t* marks = wanted.data();
    const py::gil_scoped_release release;
    return held->Lock(marks, first, count);
  }

  void StartAdapt(int64_t max_swaps, int64_t max_peer_swaps, float decay) {
    const auto held = Held();
    const py::gil_scoped_release release;
    held->StartAdapt(max_swaps, max_peer_swaps, decay);
  }

  void FinishAdapt() {
    const auto held = Held();
    const py::gil_scoped_release release;
    held->FinishAdapt();
  }

  std::vector<std::string> Audit() {
    const auto held = Held();
    const py::gil_scoped_release release;
    return held->Audit();
  }

  std::string Failure() const { return Held()->failure(); }

  // For tests: see common/stall.h; of the next job of that tier's worker.
  void Stall(int tier, int64_t milliseconds) {
    const auto held = Held();
    TierWorker* worker = tier == static_cast<int>(Tier::kPeer)   ? held->peer()
                         : tier == static_cast<int>(Tier::kHost) ? held->host()
                                                                 : nullptr;
    if (worker == nullptr || milliseconds < 0) {
      throw std::invalid_argument("expert_tiers: tier " + std::to_string(tier) +
                                  " has no worker to stall for " + std::to_string(milliseconds) +
                                  " ms");
    }
    worker->stall().Ask(std::chrono::milliseconds(milliseconds));
  }

  py::array_t<uint8_t> Tiers() const { return Shaped<uint8_t>(Held()->Tiers()); }
  py::array_t<int64_t> Usage() const { return Shaped<int64_t>(Held()->Heat()); }

  void SetRecording(bool on) { Held()->SetRecording(on); }

  py::array_t<int32_t> TakeRecords() {
    const std::vector<int32_t> records = Held()->TakeRecords();
    return py::array_t<int32_t>(static_cast<py::ssize_t>(records.size()), records.data());
  }

  py::dict Counters() const {
    const auto held = Held();
    const TierCounters& c = held->counters();
    py::dict counters;
    counters["entries_primary"] = c.entries_primary.load();
    counters["entries_peer"] = c.entries_peer.load();
    counters["entries_stream"] = c.entries_stream.load();
    counters["entries_host"] = c.entries_host.load();
    counters["entries_file"] = c.entries_file.load();
    counters["bytes_swapped"] = c.bytes_swapped.load();
    counters["bytes_streamed"] = c.bytes_streamed.load();
    counters["bytes_read"] = c.bytes_read.load();
    counters["swaps_primary"] = c.swaps_primary.load();
    counters["swaps_peer"] = c.swaps_peer.load();
    counters["waits_us"] = c.waits_us.load();
    return counters;
  }

  void Close() {
    if (slot_ < 0) return;
    const std::shared_ptr<ExpertTiers> last = std::move(tiers_);
    const py::gil_scoped_release release;
    RemoveTiers(std::exchange(slot_, -1));
  }

 private:
  template <typename T>
  py::array_t<T> Shaped(const std::vector<T>& values) const {
    py::array_t<T> array({tiers_->num_layers(), tiers_->num_experts()});
    std::copy(values.begin(), values.end(), array.mutable_data());
    return array;
  }

  std::shared_ptr<ExpertTiers> tiers_;
  int64_t slot_ = -1;
};

// One unpacker by name over whole rows, for tests: codes, d, m, k, n.
py::dict UnpackRows(int64_t type_id, const py::buffer& data, int64_t num_rows, int64_t num_cols,
                    const std::string& isa) {
  const TypeInfo* type = FindType(type_id);
  const py::buffer_info info = data.request();
  if (type == nullptr || type->form == Form::kFloat) {
    throw std::invalid_argument("unpack_rows: type " + std::to_string(type_id) +
                                " is not quantised");
  }
  int64_t row_bytes, bytes_wanted, values;
  if (num_rows < 0 || num_cols < 1 || num_cols % type->block_values != 0 ||
      __builtin_mul_overflow(num_cols / type->block_values, type->block_bytes, &row_bytes) ||
      __builtin_mul_overflow(num_rows, row_bytes, &bytes_wanted) ||
      __builtin_mul_overflow(num_rows, num_cols, &values) ||
      info.size * info.itemsize != bytes_wanted) {
    throw std::invalid_argument("unpack_rows: " + std::to_string(info.size * info.itemsize) +
                                " bytes are not " + std::to_string(num_rows) + " rows of " +
                                std::to_string(num_cols) + " values");
  }
  UnpackFn unpack = nullptr;
  if (isa == "scalar") unpack = ScalarUnpack(type->type);
  if (isa == "avx2" && CpuRuns("avx2")) unpack = Avx2Unpack(type->type);
  if (isa == "avx512" && CpuRuns("avx512")) unpack = Avx512Unpack(type->type);
  if (unpack == nullptr) throw std::invalid_argument("unpack_rows: no " + isa + " here");
  py::array_t<uint8_t> codes({num_rows, num_cols});
  py::array_t<float> d({num_rows, num_cols / 32}), m({num_rows, num_cols / 32});
  py::array_t<float> k({num_rows, num_cols / 16}), n({num_rows, num_cols / 16});
  const auto* bytes = static_cast<const uint8_t*>(info.ptr);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t begin = 0; begin < num_cols; begin += kSegment) {
      RowSegment segment = {};
      const int count = static_cast<int>(std::min<int64_t>(kSegment, num_cols - begin));
      unpack(bytes + r * row_bytes + begin / type->block_values * type->block_bytes, count / kBlock,
             &segment);
      std::copy_n(segment.codes, count, codes.mutable_data(r, begin));
      std::copy_n(segment.d, count / 32, d.mutable_data(r, begin / 32));
      std::copy_n(segment.m, count / 32, m.mutable_data(r, begin / 32));
      std::copy_n(segment.k, count / 16, k.mutable_data(r, begin / 16));
      std::copy_n(segment.n, count / 16, n.mutable_data(r, begin / 16));
    }
  }
  py::dict result;
  result["codes"] = codes;
  result["d"] = d;
  result["m"] = m;
  result["k"] = k;
  result["n"] = n;
  return result;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native ops of strata_jax for the host, and what controls them.";
  module.attr("TARGET_VERSION") = kTargetVersion;
  module.attr("BUILT_API_VERSION") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.def("targets", &Targets, "XLA handlers by op name.");
  module.def("set_threads", &ThreadPool::SetThreads, py::arg("num_threads"),
             "Replaces the host ops' pool; call while no op runs.");
  module.def("num_threads", [] { return ThreadPool::Global().num_threads(); });
  module.def(
      "kernels", [] { return std::string(ActiveKernels().name); },
      "Name of the instruction set in use.");
  module.def(
      "cpu_runs", [](const std::string& name) { return CpuRuns(name.c_str()); }, py::arg("name"));
  module.def(
      "select_kernels", [](const std::string& name) { return SelectKernels(name.c_str()); },
      py::arg("name"), "auto, scalar, avx2 or avx512; False if it cannot run here.");
  module.def("unpack_rows", &UnpackRows, py::arg("type"), py::arg("data"), py::arg("num_rows"),
             py::arg("num_cols"), py::arg("isa"));
  py::class_<StoreHandle>(module, "WeightStore")
      .def(py::init<int64_t, int64_t>(), py::arg("num_roles"), py::arg("num_layers"))
      .def_property_readonly("slot", &StoreHandle::slot)
      .def("put", &StoreHandle::Put, py::arg("role"), py::arg("layer"), py::arg("type"),
           py::arg("count"), py::arg("rows"), py::arg("cols"), py::arg("stride"),
           py::arg("address"), py::arg("num_bytes"))
      .def("close", &StoreHandle::Close);
  py::class_<TiersHandle>(module, "ExpertTiers")
      .def(py::init<const StoreHandle&, const std::array<int64_t, 3>&, int64_t, int64_t, int64_t,
                    int, int, double, int64_t, int64_t>(),
           py::arg("store"), py::arg("roles"), py::arg("num_layers"), py::arg("primary_bytes"),
           py::arg("peer_bytes"), py::arg("peer_threads"), py::arg("host_threads"),
           py::arg("stream_share"), py::arg("stream_slots"), py::arg("timeout_ms"))
      .def_property_readonly("slot", &TiersHandle::slot)
      .def("place", &TiersHandle::Place, py::arg("tiers"), py::arg("offsets"), py::arg("homes"))
      .def("fill", &TiersHandle::Fill, py::arg("first"), py::arg("count"))
      .def("lock", &TiersHandle::Lock, py::arg("wanted"), py::arg("first"), py::arg("count"))
      .def("start_adapt", &TiersHandle::StartAdapt, py::arg("max_swaps"), py::arg("max_peer_swaps"),
           py::arg("decay"))
      .def("finish_adapt", &TiersHandle::FinishAdapt)
      .def("audit", &TiersHandle::Audit)
      .def("failure", &TiersHandle::Failure)
      .def("stall", &TiersHandle::Stall, py::arg("tier"), py::arg("milliseconds"))
      .def("tiers", &TiersHandle::Tiers)
      .def("usage", &TiersHandle::Usage)
      .def("set_recording", &TiersHandle::SetRecording, py::arg("on"))
      .def("take_records", &TiersHandle::TakeRecords)
      .def("counters", &TiersHandle::Counters)
      .def("close", &TiersHandle::Close);
  BindNgramTable(module);
}

}  // namespace strata
