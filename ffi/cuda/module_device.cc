#include "cuda/module_device.h"

#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <string>

#include "cuda/current_device.h"
#include "cuda/device_store.h"
#include "cuda/device_table_bind.h"
#include "cuda/file_stage.h"
#include "cuda/handlers.h"
#include "cuda/host_workers.h"
#include "cuda/ops/expert_ffn.h"
#include "cuda/ops/gdn_chunk.h"
#include "cuda/ops/hyper_read.h"
#include "cuda/ops/ngram_gate.h"
#include "cuda/ops/qsa_attend.h"
#include "cuda/ops/qsa_select.h"
#include "cuda/ops/quant_matmul.h"
#include "cuda/ops/route.h"
#include "cuda/peer_access.h"
#include "cuda/peer_bind.h"
#include "cuda/peer_store.h"
#include "weights/ngram_table_bind.h"

namespace strata {
namespace {

namespace py = pybind11;

struct Target {
  const char* op;
  XLA_FFI_Handler* handler;
};

constexpr Target kTargets[] = {
    {"quant_matmul", QuantMatmulFfi}, {"expert_ffn", ExpertFfnFfi}, {"router_topk", RouterTopkFfi},
    {"embed_rows", EmbedRowsFfi},     {"ngram_rows", NgramRowsFfi}, {"gdn_window", GdnWindowFfi},
    {"qsa_append", QsaAppendFfi},     {"qsa_select", QsaSelectFfi}, {"qsa_attend", QsaAttendFfi},
    {"hyper_read", HyperReadFfi},     {"ngram_gate", NgramGateFfi}, {"gdn_chunk", GdnChunkFfi},
    {"ngram_ask", NgramAskFfi},       {"route", RouteFfi},          {"mark", MarkFfi},
};

py::dict Targets() {
  py::dict targets;
  for (const Target& target : kTargets) {
    targets[target.op] =
        py::capsule(reinterpret_cast<void*>(target.handler), "xla._CUSTOM_CALL_TARGET");
  }
  return targets;
}

DeviceMatrix CheckedShape(int64_t type, int64_t count, int64_t rows, int64_t cols) {
  const TypeInfo* info = FindType(type);
  if (info == nullptr) {
    throw std::invalid_argument("device_store: type " + std::to_string(type) + " is unknown");
  }
  constexpr int64_t kMost = int64_t{1} << 31;
  if (count < 1 || rows < 1 || cols < 1 || count >= kMost || rows >= kMost || cols >= kMost ||
      cols % info->block_values != 0 || cols % 32 != 0) {
    throw std::invalid_argument("device_store: " + std::to_string(count) + " matrices [" +
                                std::to_string(rows) + ", " + std::to_string(cols) + "] of " +
                                info->name + ", expected rows of whole blocks of 32 values");
  }
  return ShapeOf(info, count, rows, cols);
}

int64_t MatrixBytes(int64_t type, int64_t count, int64_t rows, int64_t cols) {
  const DeviceMatrix shape = CheckedShape(type, count, rows, cols);
  return (shape.count * shape.bytes_each + 255) / 256 * 256;
}

ExpertShape ShapeOfExpert(const std::array<int64_t, 3>& types, int64_t hidden, int64_t width) {
  ExpertShape shape;
  shape.gate = CheckedShape(types[0], 1, hidden, width);
  shape.up = CheckedShape(types[1], 1, hidden, width);
  shape.down = CheckedShape(types[2], 1, width, hidden);
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  shape.up_at = aligned(shape.gate.bytes_each);
  shape.down_at = shape.up_at + aligned(shape.up.bytes_each);
  shape.bytes = shape.down_at + aligned(shape.down.bytes_each);
  return shape;
}

int64_t DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::pair<int64_t, int64_t> Memory(int device) {
  const CurrentDevice current(device);
  if (!current.problem().empty()) throw std::runtime_error(current.problem());
  size_t free_bytes = 0, total_bytes = 0;
  const cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  return {static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

const DeviceMatrix& MatrixOf(const DeviceStore& store, int64_t role, int64_t layer) {
  const DeviceMatrix* matrix = store.Get(role, layer);
  if (matrix == nullptr) {
    throw std::invalid_argument("device_store: no matrix of role " + std::to_string(role) +
                                " in layer " + std::to_string(layer));
  }
  return *matrix;
}

std::shared_ptr<DeviceStore> StoreAt(int64_t slot) {
  auto store = FindDeviceStore(slot);
  if (store == nullptr) {
    throw std::invalid_argument("device_store: " + std::to_string(slot) + " is closed");
  }
  return store;
}

int64_t MatmulWorkspace(int64_t slot, int64_t layer, const std::vector<int64_t>& roles,
                        int64_t num_rows) {
  const auto store = StoreAt(slot);
  std::vector<const DeviceMatrix*> matrices;
  for (const int64_t role : roles) matrices.push_back(&MatrixOf(*store, role, layer));
  return QuantMatmulWorkspace(num_rows, matrices) * 4;
}

int64_t RouterWorkspace(int64_t slot, int64_t layer, const std::array<int64_t, 2>& roles,
                        int64_t num_rows) {
  const auto store = StoreAt(slot);
  return 4 * RouteWorkspace(num_rows, MatrixOf(*store, roles[0], layer),
                            MatrixOf(*store, roles[1], layer));
}

int64_t ReadWorkspace(int64_t slot, int64_t layer, int64_t down, int64_t num_rows,
                      int64_t num_streams) {
  const auto store = StoreAt(slot);
  const DeviceMatrix& matrix = MatrixOf(*store, down, layer);
  return HyperReadWorkspace(num_rows, num_streams, matrix.cols / num_streams, matrix.rows) * 4;
}

int64_t FfnWorkspace(int64_t slot, int64_t layer, int64_t shared_gate, int64_t num_rows,
                     int64_t num_active) {
  const auto store = StoreAt(slot);
  const ExpertShape* shape = store->GetExpertShape(layer);
  if (shape == nullptr) {
    throw std::invalid_argument("device_store: no experts in layer " + std::to_string(layer));
  }
  if (store->ScratchOf(num_rows) != nullptr) return 16;  // it is borrowed; one result all the same
  const int64_t hidden = std::max(shape->gate.rows, MatrixOf(*store, shared_gate, layer).rows);
  return ExpertFfnWorkspace(num_rows, num_active, store->num_experts(), shape->gate.cols, hidden,
                            store->HasWholeTiles());
}

// Python's hold on a DeviceStore and its slot.
class DeviceStoreHandle {
 public:
  DeviceStoreHandle(int64_t num_roles, int64_t num_layers, int64_t num_experts,
                    int64_t matrix_bytes, int64_t expert_bytes, int64_t host_expert_bytes)
      : store_(std::make_shared<DeviceStore>(num_roles, num_layers, num_experts, matrix_bytes,
                                             expert_bytes, host_expert_bytes)),
        slot_(AddDeviceStore(store_)) {}
  ~DeviceStoreHandle() { Close(); }

  int64_t slot() const { return slot_; }

  DeviceStore& Held() const {
    if (store_ == nullptr) throw std::invalid_argument("device_store: it is closed");
    return *store_;
  }

  void Put(int64_t role, int64_t layer, int64_t type, int64_t count, int64_t rows, int64_t cols,
           int64_t stride, uintptr_t address) {
    const DeviceMatrix shape = CheckedShape(type, count, rows, cols);
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.Put(role, layer, shape, stride, reinterpret_cast<const uint8_t*>(address)));
  }

  void PutExpertShape(int64_t layer, const std::array<int64_t, 3>& types, int64_t hidden,
                      int64_t width) {
    Check(Held().PutExpertShape(layer, ShapeOfExpert(types, hidden, width)));
  }

  void PutExpert(int64_t layer, int64_t expert, int32_t arena, int64_t offset,
                 const std::array<uintptr_t, 3>& raw) {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.PutExpert(
        layer, expert, static_cast<Arena>(arena), offset, reinterpret_cast<const uint8_t*>(raw[0]),
        reinterpret_cast<const uint8_t*>(raw[1]), reinterpret_cast<const uint8_t*>(raw[2])));
  }

  std::string AuditExpert(int64_t layer, int64_t expert, const std::array<uintptr_t, 3>& raw) {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    return store.AuditExpert(layer, expert, reinterpret_cast<const uint8_t*>(raw[0]),
                             reinterpret_cast<const uint8_t*>(raw[1]),
                             reinterpret_cast<const uint8_t*>(raw[2]));
  }

  void SetTag(int64_t layer, int64_t expert, uint32_t tag) {
    Check(Held().SetTag(layer, expert, static_cast<ExpertTag>(tag)));
  }

  void PutFileExpert(int64_t layer, int64_t expert, const std::array<uintptr_t, 3>& raw) {
    Check(Held().PutFileExpert(layer, expert, reinterpret_cast<const uint8_t*>(raw[0]),
                               reinterpret_cast<const uint8_t*>(raw[1]),
                               reinterpret_cast<const uint8_t*>(raw[2])));
  }
  void StartFiles(int num_threads, int64_t timeout_ms) {
    Check(Held().StartFiles(num_threads, timeout_ms));
  }
  void OpenDoors(int64_t window_rows, int64_t num_active, int64_t width) {
    Check(Held().OpenDoors(window_rows, num_active, width));
  }
  void StartHost(int num_threads, int64_t timeout_ms) {
    Check(Held().StartHost(num_threads, timeout_ms));
  }
  void SetStreamed(const std::vector<uint8_t>& streamed) { Check(Held().SetStreamed(streamed)); }
  double LinkSecondsPerByte() { return Held().LinkSecondsPerByte(); }
  double HostSecondsPerExpert(int64_t layer, int64_t count) {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    return store.host() == nullptr ? 0.0 : store.host()->SecondsPerExpert(layer, count);
  }
  void Wake() {
    if (HostWorkers* host = Held().host()) host->Wake();
  }
  bool Aborted() { return Held().aborted(); }
  bool Recover() {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    return store.Recover();
  }
  void Stall(int64_t milliseconds, int64_t timeout_ms) {
    Held().SetTimeout(timeout_ms);
    if (HostWorkers* host = Held().host())
      host->stall().Ask(std::chrono::milliseconds(milliseconds));
  }
  void StartSwaps(int64_t every, int64_t most, int64_t on_peer, float decay) {
    Check(Held().StartSwaps({every, most, on_peer, decay}));
  }
  void AddSpares(int64_t layer, int32_t arena, int64_t offset, int64_t on_host) {
    Check(Held().AddSpares(layer, static_cast<Arena>(arena), offset, on_host));
  }
  void AfterWindow() {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.AfterWindow());
  }
  void LendExpert(int64_t layer, int64_t expert, int64_t home) {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.LendExpert(layer, expert, home));
  }
  void OpenRing(int64_t num_slots, int64_t min_rows, int64_t patience_ms, int num_threads,
                int64_t lent_at, int64_t scratch_bytes, int64_t scratch_above) {
    Check(Held().OpenRing(
        {num_slots, min_rows, patience_ms, num_threads, lent_at, scratch_bytes, scratch_above}));
  }
  void BorrowSlots() {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.BorrowSlots());
  }
  void GiveSlotsBack() {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.GiveSlotsBack());
  }
  void OpenTimeline(int64_t capacity) { Check(Held().OpenTimeline(capacity)); }
  void OpenPeerTiles(int64_t max_rows, int64_t num_slots, double share, int64_t min_rows,
                     int64_t patience_ms) {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.OpenPeerTiles({max_rows, num_slots, share, min_rows, patience_ms}));
  }
  void OpenPeerAttention(const PeerAttentionSizes& sizes) {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.OpenPeerAttention(sizes));
  }
  std::vector<std::pair<uint64_t, uint64_t>> TakePeerTimeline() {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    return store.TakePeerTimeline();
  }
  std::vector<std::pair<uint64_t, uint64_t>> TakeTimeline() {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    return store.TakeTimeline();
  }
  void BeginPrompt() { Held().BeginPrompt(); }
  void BeginPass(int64_t num_rows) {
    DeviceStore& store = Held();
    const py::gil_scoped_release release;
    Check(store.BeginPass(num_rows));
  }
  std::map<std::string, int64_t> RingCounts() { return CountsOf(Held().ring()); }
  std::map<std::string, int64_t> PeerRingCounts() {
    const PeerTiles* tiles = Held().PeersTiles();
    return CountsOf(tiles == nullptr ? nullptr : tiles->ring());
  }
  static std::map<std::string, int64_t> CountsOf(ExpertRing* ring) {
    const ExpertRing::Counts c = ring == nullptr ? ExpertRing::Counts{} : ring->counts();
    return {{"passes", c.passes},      {"copied", c.copied},     {"bytes", c.bytes},
            {"given_up", c.given_up},  {"left_out", c.left_out}, {"unrouted", c.unrouted},
            {"waited_us", c.waited_us}};
  }
  bool TakeMissed() {
    ExpertRing* ring = Held().ring();
    return ring != nullptr && ring->TakeMissed();
  }
  std::array<int64_t, 3> Swapped() {
    const DeviceSwaps* swaps = Held().swaps();
    if (swaps == nullptr) return {0, 0, 0};
    return {swaps->swaps(ExpertTag::kLocal), swaps->swaps(ExpertTag::kPeer),
            swaps->bytes_swapped()};
  }
  std::vector<int32_t> Tiers() {
    const DeviceStore& store = Held();
    std::vector<int32_t> tiers;
    for (int64_t i = 0; i < store.num_layers() * store.num_experts(); ++i) {
      tiers.push_back(
          static_cast<int32_t>(store.ArenaOf(i / store.num_experts(), i % store.num_experts())));
    }
    return tiers;
  }
  std::vector<uint32_t> TakeHomes() { return Held().TakeHomes(); }
  int64_t HostBusyUs() { return Held().host() == nullptr ? 0 : Held().host()->busy_us(); }

  void OpenPeer(int device, bool through_host, int64_t expert_bytes, int64_t hidden,
                int64_t most_rows) {
    Check(Held().OpenPeer(device, through_host, expert_bytes, hidden, most_rows));
  }

  bool PeerAborted() { return Held().peer() != nullptr && Held().peer()->aborted(); }
  void RecoverPeer() {
    PeerStore* peer = Held().peer();
    if (peer == nullptr) return;
    const py::gil_scoped_release release;
    Check(peer->Recover());
  }
  void LosePeerRows(int64_t timeout_ms) {
    if (PeerStore* peer = Held().peer()) peer->LoseRows(timeout_ms);
  }

  // Loads the peer's kernels for a layer's experts; the roles are the shared one's three matrices.
  void WarmPeer(int64_t layer, const std::array<int64_t, 3>& roles) {
    DeviceStore& store = Held();
    if (store.peer() == nullptr) throw std::invalid_argument("device_store: it has no peer");
    const PeerSizes& sizes = store.peer()->sizes();
    ExpertFfnArgs args = {};
    args.num_rows = sizes.max_rows;
    args.num_active = sizes.num_active;
    args.width = sizes.width;
    args.routed = store.GetExpertShape(layer);
    args.shared_gate = &MatrixOf(store, roles[0], layer);
    args.shared_up = &MatrixOf(store, roles[1], layer);
    args.shared_down = &MatrixOf(store, roles[2], layer);
    args.streamed = store.doors()->streamed.data();
    const py::gil_scoped_release release;
    Check(store.peer()->Warm(args));
  }

  void PublishExperts() { Check(Held().PublishExperts()); }
  std::vector<uint32_t> TakeUsage() { return Held().TakeUsage(); }

  void Close() {
    if (slot_ >= 0) RemoveDeviceStore(slot_);
    slot_ = -1;
    store_ = nullptr;
  }

 private:
  static void Check(const std::string& error) {
    if (!error.empty()) throw std::runtime_error(error);
  }

  std::shared_ptr<DeviceStore> store_;
  int64_t slot_;
};

}  // namespace

void BindDevice(py::module_& module) {
  module.def("targets", &Targets, "XLA handlers by op.");
  module.def(
      "handler_calls", [] { return handler_calls.load(); },
      "How often a handler ran since the library was loaded.");
  module.def("enable_peer_access", &EnablePeerAccess, py::arg("device"), py::arg("peer"),
             "Why kernels of one device cannot reach another's memory; empty if they can.");
  module.def(
      "last_error", [] { return std::string(cudaGetErrorString(cudaPeekAtLastError())); },
      "The error state of this thread, which stays.");
  module.def("device_count", &DeviceCount, "Devices that are visible.");
  module.def("memory", &Memory, py::arg("device"), "Free and total bytes of a device.");
  module.def("matrix_bytes", &MatrixBytes, py::arg("type"), py::arg("count"), py::arg("rows"),
             py::arg("cols"), "Bytes of matrices as panels.");
  module.def(
      "expert_bytes",
      [](const std::array<int64_t, 3>& types, int64_t hidden, int64_t width) {
        return ShapeOfExpert(types, hidden, width).bytes;
      },
      py::arg("types"), py::arg("hidden"), py::arg("width"), "Bytes of one expert's slot.");
  module.def("quant_matmul_workspace", &MatmulWorkspace, py::arg("store"), py::arg("layer"),
             py::arg("roles"), py::arg("num_rows"), "Bytes.");
  module.def("route_workspace", &RouterWorkspace, py::arg("store"), py::arg("layer"),
             py::arg("roles"), py::arg("num_rows"), "Bytes.");
  module.def("hyper_read_workspace", &ReadWorkspace, py::arg("store"), py::arg("layer"),
             py::arg("down"), py::arg("num_rows"), py::arg("num_streams"), "Bytes.");
  module.def("gdn_chunk_workspace", &GdnChunkWorkspace, py::arg("num_rows"), py::arg("key_heads"),
             py::arg("value_heads"), py::arg("head_dim"), "Bytes.");
  module.def("expert_ffn_workspace", &FfnWorkspace, py::arg("store"), py::arg("layer"),
             py::arg("shared_gate"), py::arg("num_rows"), py::arg("num_active"), "Bytes.");
  module.def("qsa_select_workspace", &QsaSelectWorkspace, py::arg("num_rows"),
             py::arg("num_groups"), "Bytes.");
  module.def("qsa_attend_workspace", &QsaAttendWorkspace, py::arg("num_rows"), py::arg("num_heads"),
             py::arg("head_dim"), py::arg("num_cells"), py::arg("num_blocks"), py::arg("ratio"),
             "Bytes.");
  module.def("ngram_gate_workspace", &NgramGateWorkspace, py::arg("num_rows"),
             py::arg("num_streams"), "Bytes.");
  BindNgramTable(module);
  BindDeviceTable(module);
  BindPeer(module);
  py::class_<DeviceStoreHandle>(module, "DeviceStore")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(), py::arg("num_roles"),
           py::arg("num_layers"), py::arg("num_experts"), py::arg("matrix_bytes"),
           py::arg("expert_bytes"), py::arg("host_expert_bytes"))
      .def_property_readonly("slot", &DeviceStoreHandle::slot)
      .def("put", &DeviceStoreHandle::Put, py::arg("role"), py::arg("layer"), py::arg("type"),
           py::arg("count"), py::arg("rows"), py::arg("cols"), py::arg("stride"),
           py::arg("address"))
      .def("put_expert_shape", &DeviceStoreHandle::PutExpertShape, py::arg("layer"),
           py::arg("types"), py::arg("hidden"), py::arg("width"))
      .def("put_expert", &DeviceStoreHandle::PutExpert, py::arg("layer"), py::arg("expert"),
           py::arg("arena"), py::arg("offset"), py::arg("raw"))
      .def("audit_expert", &DeviceStoreHandle::AuditExpert, py::arg("layer"), py::arg("expert"),
           py::arg("raw"))
      .def("put_file_expert", &DeviceStoreHandle::PutFileExpert, py::arg("layer"),
           py::arg("expert"), py::arg("raw"))
      .def("start_files", &DeviceStoreHandle::StartFiles, py::arg("num_threads"),
           py::arg("timeout_ms"))
      .def("set_tag", &DeviceStoreHandle::SetTag, py::arg("layer"), py::arg("expert"),
           py::arg("tag"))
      .def("open_doors", &DeviceStoreHandle::OpenDoors, py::arg("window_rows"),
           py::arg("num_active"), py::arg("width"))
      .def("start_host", &DeviceStoreHandle::StartHost, py::arg("num_threads"),
           py::arg("timeout_ms"))
      .def("set_streamed", &DeviceStoreHandle::SetStreamed, py::arg("streamed"))
      .def("link_seconds_per_byte", &DeviceStoreHandle::LinkSecondsPerByte)
      .def("host_seconds_per_expert", &DeviceStoreHandle::HostSecondsPerExpert, py::arg("layer"),
           py::arg("count"))
      .def("wake", &DeviceStoreHandle::Wake)
      .def("aborted", &DeviceStoreHandle::Aborted)
      .def("recover", &DeviceStoreHandle::Recover)
      .def("peer_aborted", &DeviceStoreHandle::PeerAborted)
      .def("recover_peer", &DeviceStoreHandle::RecoverPeer)
      .def("lose_peer_rows", &DeviceStoreHandle::LosePeerRows, py::arg("timeout_ms"))
      .def("stall", &DeviceStoreHandle::Stall, py::arg("milliseconds"), py::arg("timeout_ms"))
      .def("start_swaps", &DeviceStoreHandle::StartSwaps, py::arg("every"), py::arg("most"),
           py::arg("on_peer"), py::arg("decay"))
      .def("add_spares", &DeviceStoreHandle::AddSpares, py::arg("layer"), py::arg("arena"),
           py::arg("offset"), py::arg("on_host"))
      .def("after_window", &DeviceStoreHandle::AfterWindow)
      .def("open_ring", &DeviceStoreHandle::OpenRing, py::arg("num_slots"), py::arg("min_rows"),
           py::arg("patience_ms"), py::arg("num_threads"), py::arg("lent_at"),
           py::arg("scratch_bytes"), py::arg("scratch_above"))
      .def("lend_expert", &DeviceStoreHandle::LendExpert, py::arg("layer"), py::arg("expert"),
           py::arg("home"))
      .def("borrow_slots", &DeviceStoreHandle::BorrowSlots)
      .def("give_slots_back", &DeviceStoreHandle::GiveSlotsBack)
      .def("open_timeline", &DeviceStoreHandle::OpenTimeline, py::arg("capacity"))
      .def("take_timeline", &DeviceStoreHandle::TakeTimeline,
           "(nanoseconds, phase) of every mark since the last time.")
      .def("begin_prompt", &DeviceStoreHandle::BeginPrompt)
      .def("begin_pass", &DeviceStoreHandle::BeginPass, py::arg("num_rows"))
      .def("ring_counts", &DeviceStoreHandle::RingCounts)
      .def("peer_ring_counts", &DeviceStoreHandle::PeerRingCounts)
      .def("open_peer_tiles", &DeviceStoreHandle::OpenPeerTiles, py::arg("max_rows"),
           py::arg("num_slots"), py::arg("share"), py::arg("min_rows"), py::arg("patience_ms"))
      .def("open_peer_attention", &DeviceStoreHandle::OpenPeerAttention, py::arg("sizes"))
      .def("take_peer_timeline", &DeviceStoreHandle::TakePeerTimeline,
           "(nanoseconds, phase) of every mark of the peer's since the last time.")
      .def("take_missed", &DeviceStoreHandle::TakeMissed,
           "Whether rows went without an expert that did not arrive, since it was asked last.")
      .def("swapped", &DeviceStoreHandle::Swapped,
           "Swaps since the start on the primary and on the peer, and the bytes of both.")
      .def("tiers", &DeviceStoreHandle::Tiers, "[layers * experts]: of every expert.")
      .def("take_homes", &DeviceStoreHandle::TakeHomes)
      .def("host_busy_us", &DeviceStoreHandle::HostBusyUs)
      .def("open_peer", &DeviceStoreHandle::OpenPeer, py::arg("device"), py::arg("through_host"),
           py::arg("expert_bytes"), py::arg("hidden"), py::arg("most_rows"))
      .def("warm_peer", &DeviceStoreHandle::WarmPeer, py::arg("layer"), py::arg("shared_roles"))
      .def("publish_experts", &DeviceStoreHandle::PublishExperts)
      .def("take_usage", &DeviceStoreHandle::TakeUsage)
      .def("close", &DeviceStoreHandle::Close);
}

}  // namespace strata
