// The library's one list: every XLA target, and the small control surface that Python holds.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "common/panel.h"
#include "common/thread_pool.h"
#include "ops/handlers.h"
#include "weights/weight_store.h"

namespace strata {
namespace {

namespace py = pybind11;

// Python's name for a target is "strata.<op>"; the version is part of it because XLA's compilation cache
// does not see this library. Raise it when any op's results or arguments change.
constexpr const char* kTargetVersion = "1";

struct Target {
  const char* op;
  XLA_FFI_Handler* handler;
};

constexpr Target kTargets[] = {
    {"quant_matmul", QuantMatmulFfi}, {"expert_ffn", ExpertFfnFfi},
    {"router_topk", RouterTopkFfi},   {"embed_rows", EmbedRowsFfi},
    {"ngram_rows", NgramRowsFfi},     {"gdn_window", GdnWindowFfi},
    {"qsa_append", QsaAppendFfi},     {"qsa_select", QsaSelectFfi},
    {"qsa_attend", QsaAttendFfi},     {"hyper_read", HyperReadFfi},
    {"ngram_gate", NgramGateFfi},
};

py::dict Targets() {
  py::dict targets;
  for (const Target& target : kTargets) {
    targets[target.op] = py::capsule(reinterpret_cast<void*>(target.handler), "xla._CUSTOM_CALL_TARGET");
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

// One unpacker by name over whole rows, for tests: codes, d, m, k, n.
py::dict UnpackRows(int64_t type_id, const py::buffer& data, int64_t num_rows, int64_t num_cols,
                    const std::string& isa) {
  const TypeInfo* type = FindType(type_id);
  const py::buffer_info info = data.request();
  if (type == nullptr || type->form == Form::kFloat) {
    throw std::invalid_argument("unpack_rows: type " + std::to_string(type_id) + " is not quantised");
  }
  const int64_t row_bytes = num_cols / type->block_values * type->block_bytes;
  if (num_cols % type->block_values != 0 || info.size * info.itemsize != num_rows * row_bytes) {
    throw std::invalid_argument("unpack_rows: bytes and shape do not fit");
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
  module.attr("BUILT_API_VERSION") =
      py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.def("targets", &Targets, "XLA handlers by op name.");
  module.def("set_threads", &ThreadPool::SetThreads, py::arg("num_threads"),
             "Replaces the host ops' pool; call while no op runs.");
  module.def("num_threads", [] { return ThreadPool::Global().num_threads(); });
  module.def("kernels", [] { return std::string(ActiveKernels().name); },
             "Name of the instruction set in use.");
  module.def("cpu_runs", [](const std::string& name) { return CpuRuns(name.c_str()); },
             py::arg("name"));
  module.def("select_kernels", [](const std::string& name) { return SelectKernels(name.c_str()); },
             py::arg("name"), "auto, scalar, avx2 or avx512; False if it cannot run here.");
  module.def("unpack_rows", &UnpackRows, py::arg("type"), py::arg("data"), py::arg("num_rows"),
             py::arg("num_cols"), py::arg("isa"));
  py::class_<StoreHandle>(module, "WeightStore")
      .def(py::init<int64_t, int64_t>(), py::arg("num_roles"), py::arg("num_layers"))
      .def_property_readonly("slot", &StoreHandle::slot)
      .def("put", &StoreHandle::Put, py::arg("role"), py::arg("layer"), py::arg("type"),
           py::arg("count"), py::arg("rows"), py::arg("cols"), py::arg("stride"), py::arg("address"),
           py::arg("num_bytes"))
      .def("close", &StoreHandle::Close);
}

}  // namespace strata
