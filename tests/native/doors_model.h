// One layer of experts in a device store, with a call's operands: what tests of doors share.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/device_store.h"
#include "cuda/ops/expert_ffn.h"

namespace strata {

struct DoorsSizes {
  GgmlType gate, down, shared;
  int64_t width, hidden, shared_hidden;
};

// The first has kernels of its own, the second does not.
inline constexpr DoorsSizes kInlined = {
    GgmlType::kIQ3_S, GgmlType::kIQ4_NL, GgmlType::kQ8_0, 512, 384, 384};
inline constexpr DoorsSizes kGeneral = {
    GgmlType::kQ6_K, GgmlType::kQ5_1, GgmlType::kQ4_0, 256, 96, 160};

inline constexpr int64_t kExperts = 12;
inline constexpr int64_t kActive = 5;
inline constexpr int64_t kRows = 3;

class DoorsModel {
 public:
  explicit DoorsModel(const DoorsSizes& s, uint32_t seed = 1) : sizes(s), random_(seed) {
    gate_ = Bytes(s.gate, kExperts * s.hidden, s.width);
    up_ = Bytes(s.gate, kExperts * s.hidden, s.width);
    down_ = Bytes(s.down, kExperts * s.width, s.hidden);
    shared_[0] = Bytes(s.shared, s.shared_hidden, s.width);
    shared_[1] = Bytes(s.shared, s.shared_hidden, s.width);
    shared_[2] = Bytes(s.shared, s.width, s.shared_hidden);
    shape.gate = ShapeOf(Type(s.gate), 1, s.hidden, s.width);
    shape.up = shape.gate;
    shape.down = ShapeOf(Type(s.down), 1, s.width, s.hidden);
    shape.up_at = Aligned(shape.gate.bytes_each);
    shape.down_at = 2 * shape.up_at;
    shape.bytes = shape.down_at + Aligned(shape.down.bytes_each);
    x = Floats(kRows * s.width);
    weights = Floats(kRows * kActive);
    shared_weights = Floats(kRows);
    for (int64_t row = 0; row < kRows; ++row) {
      std::vector<int32_t> all(kExperts);
      for (int32_t e = 0; e < kExperts; ++e) all[e] = e;
      std::shuffle(all.begin(), all.end(), random_);
      ids.insert(ids.end(), all.begin(), all.begin() + kActive);
    }
  }

  // With room for every expert on the device and on the host; even experts are put on the device.
  std::shared_ptr<DeviceStore> Store() const {
    const auto store = std::make_shared<DeviceStore>(
        3, 1, kExperts, 1 << 22, kExperts * shape.bytes, kExperts * shape.bytes);
    const DoorsSizes& s = sizes;
    const int64_t sides[3][2] = {
        {s.shared_hidden, s.width}, {s.shared_hidden, s.width}, {s.width, s.shared_hidden}};
    for (int role = 0; role < 3; ++role) {
      const DeviceMatrix m = ShapeOf(Type(s.shared), 1, sides[role][0], sides[role][1]);
      CHECK_EQ(store->Put(role, 0, m, m.rows, shared_[role].data()), "");
    }
    CHECK_EQ(store->PutExpertShape(0, shape), "");
    for (int64_t e = 0; e < kExperts; ++e) {
      Put(*store, e, e % 2 == 0 ? Arena::kDevice : Arena::kHost, e * shape.bytes);
    }
    CHECK_EQ(store->PublishExperts(), "");
    return store;
  }

  void Put(DeviceStore& store, int64_t e, Arena arena, int64_t offset) const {
    CHECK_EQ(store.PutExpert(0, e, arena, offset, Part(gate_, e), Part(up_, e), Part(down_, e)),
             "");
  }

  std::string Audit(DeviceStore& store, int64_t e) const {
    return store.AuditExpert(0, e, Part(gate_, e), Part(up_, e), Part(down_, e));
  }

  ExpertFfnArgs Args(const DeviceStore& store, float* y) {
    ExpertFfnArgs a = {};
    a.x = x.data();
    a.ids = ids.data();
    a.weights = weights.data();
    a.shared_weights = shared_weights.data();
    a.live = &live;
    a.y = y;
    const int64_t hidden = std::max(sizes.hidden, sizes.shared_hidden);
    const int64_t bytes = ExpertFfnWorkspace(kRows, kActive, kExperts, sizes.width, hidden);
    workspace_.resize(bytes / 16 + 1);
    a.workspace = reinterpret_cast<unsigned char*>(workspace_.data());
    a.num_rows = kRows;
    a.num_active = kActive;
    a.num_experts = kExperts;
    a.width = sizes.width;
    a.routed = store.GetExpertShape(0);
    a.experts = store.experts(0);
    a.usage = store.usage(0);
    a.shared_gate = store.Get(0, 0);
    a.shared_up = store.Get(1, 0);
    a.shared_down = store.Get(2, 0);
    return a;
  }

  std::vector<float> Run(const ExpertFfnArgs& args) {
    CHECK_EQ(ExpertGateUp(args, nullptr), "");
    CHECK_EQ(ExpertDown(args, nullptr), "");
    return {args.y, args.y + kRows * sizes.width};
  }

  std::vector<float> WithoutDoors() {
    const auto store = Store();
    std::vector<float> y(kRows * sizes.width);
    return Run(Args(*store, y.data()));
  }

  DoorsSizes sizes;
  ExpertShape shape;
  std::vector<float> x, weights, shared_weights;
  std::vector<int32_t> ids;
  int32_t live = kRows;

 private:
  struct alignas(16) Chunk {
    uint8_t bytes[16];
  };

  // Of one expert.
  static const uint8_t* Part(const std::vector<uint8_t>& all, int64_t e) {
    return all.data() + all.size() / kExperts * e;
  }

  static const TypeInfo* Type(GgmlType type) { return FindType(static_cast<int64_t>(type)); }
  static int64_t Aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  // Random codes, scales of ordinary sizes.
  std::vector<uint8_t> Bytes(GgmlType type, int64_t rows, int64_t cols) {
    const TypeInfo& info = *Type(type);
    std::vector<uint8_t> bytes(rows * cols / info.block_values * info.block_bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random_());
    const bool last = type == GgmlType::kQ6_K;  // where a block's scale stands
    for (size_t i = 0; i < bytes.size(); i += info.block_bytes) {
      uint8_t* scale = &bytes[i] + (last ? info.block_bytes - 2 : 0);
      scale[1] = static_cast<uint8_t>(0x20 + random_() % 4);
      if (type == GgmlType::kQ5_1) scale[3] = scale[1];
    }
    return bytes;
  }

  std::vector<float> Floats(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  std::mt19937 random_;
  std::vector<uint8_t> gate_, up_, down_, shared_[3];
  std::vector<Chunk> workspace_;
};

}  // namespace strata
