#include "cuda/peer_bind.h"

#include <pybind11/stl.h>

#include <map>
#include <string>

#include "cuda/peer_attention.h"
#include "cuda/peer_tiles.h"

namespace strata {

namespace py = pybind11;

void BindPeer(py::module_& module) {
  module.def(
      "peer_tiles_bytes",
      [](int64_t max_rows, int64_t num_active, int64_t num_experts, int64_t width, int64_t hidden) {
        return PeerTilesBytes({max_rows, num_active, num_experts, 1, width, hidden});
      },
      py::arg("max_rows"), py::arg("num_active"), py::arg("num_experts"), py::arg("width"),
      py::arg("hidden"), "Of a peer's memory, for rows of prompts.");
  module.def("peer_attention_bytes", &PeerAttentionBytes, py::arg("sizes"),
             "Of a peer's memory, for rows of attention.");
  py::class_<PeerAttentionSizes>(module, "PeerAttentionSizes")
      .def(py::init([](const std::map<std::string, double>& sizes) {
             const auto whole = [&](const char* name) {
               return static_cast<int64_t>(sizes.at(name));
             };
             PeerAttentionSizes s;
             s.share = sizes.at("share");
             s.max_rows = whole("max_rows");
             s.num_cells = whole("num_cells");
             s.num_heads = whole("num_heads");
             s.num_kv_heads = whole("num_kv_heads");
             s.head_dim = whole("head_dim");
             s.cell_bytes = whole("cell_bytes");
             s.has_scales = sizes.at("has_scales") != 0;
             s.index_heads = whole("index_heads");
             s.index_dim = whole("index_dim");
             s.num_groups = whole("num_groups");
             s.ratio = whole("ratio");
             s.num_blocks = whole("num_blocks");
             return s;
           }),
           py::arg("sizes"));
}

}  // namespace strata
