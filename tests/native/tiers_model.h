// A small model of random expert matrices in a mapped file, and calls of expert_ffn with it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "ops/expert_ffn.h"

namespace strata {

// One layer of routed experts and one shared expert.
struct LayerShape {
  GgmlType type;
  int64_t hidden;
  int64_t shared_hidden;
  bool fused;  // gate and up rows of an expert lie side by side
};

// Types and sizes differ by layer, as in the files that llama.cpp's mixes give.
inline constexpr LayerShape kLayers[] = {
    {GgmlType::kQ8_0, 64, 32, false},
    {GgmlType::kF32, 32, 64, false},
    {GgmlType::kQ8_0, 32, 32, true},
};
inline constexpr int64_t kNumLayers = std::size(kLayers);
inline constexpr int64_t kExperts = 12;
inline constexpr int64_t kPairs = kNumLayers * kExperts;
inline constexpr int64_t kWidth = 96;
inline constexpr int64_t kActive = 3;
inline constexpr std::array<int64_t, 3> kRoutedRoles = {0, 1, 2};

inline const TypeInfo* TypeOf(GgmlType type) { return FindType(static_cast<int64_t>(type)); }

// What one call of the op is given.
struct Inputs {
  int64_t layer;
  int64_t num_rows;
  int64_t num_live;
  std::vector<float> x, weights, shared_weights;
  std::vector<int32_t> ids;

  int64_t entries() const { return num_live * kActive; }
};

// A call whose answer is known.
struct Expected {
  Inputs inputs;
  std::vector<float> y;
};

// Three slots a layer on the primary, two on the peer, the rest at home.
inline std::vector<Tier> FewSlots(Tier home) {
  std::vector<Tier> tiers;
  for (int64_t i = 0; i < kPairs; ++i) {
    const int64_t expert = i % kExperts;
    tiers.push_back(expert < 3 ? Tier::kPrimary : expert < 5 ? Tier::kPeer : home);
  }
  return tiers;
}

inline TierOptions AllWorkers(double stream_share) {
  TierOptions options;
  options.peer_threads = 2;
  options.host_threads = 2;
  options.stream_share = stream_share;
  return options;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class TiersModel {
 public:
  explicit TiersModel(const std::string& folder) {
    for (int64_t l = 0; l < kNumLayers; ++l) AddLayer(l);
    std::string name = folder + "/strata_experts_XXXXXX";
    const int fd = mkstemp(name.data());
    CHECK(fd >= 0);
    unlink(name.c_str());  // the mapping keeps it
    CHECK_EQ(write(fd, bytes_.data(), bytes_.size()), static_cast<ssize_t>(bytes_.size()));
    mapping_ = mmap(nullptr, bytes_.size(), PROT_READ, MAP_SHARED, fd, 0);
    CHECK(mapping_ != MAP_FAILED);
    close(fd);
    for (Put& put : puts_) {
      put.matrix.bytes = static_cast<const uint8_t*>(mapping_) + put.offset;
      CHECK_EQ(store->Put(put.role, put.layer, put.matrix, put.num_bytes), "");
    }
  }
  ~TiersModel() { munmap(mapping_, bytes_.size()); }
  TiersModel(const TiersModel&) = delete;
  TiersModel& operator=(const TiersModel&) = delete;

  // Tier of every expert (home: host or file) -> tiers with their arenas placed and filled.
  std::shared_ptr<ExpertTiers> Open(const std::vector<Tier>& tiers, TierOptions options,
                                    Tier home = Tier::kHost) const {
    const ExpertTiers sizes(store, kRoutedRoles, kNumLayers, {});
    std::vector<uint8_t> marks, homes(kPairs, static_cast<uint8_t>(home));
    std::vector<int64_t> offsets(kPairs, -1);
    options.primary_bytes = options.peer_bytes = 0;
    for (int64_t i = 0; i < kPairs; ++i) {
      marks.push_back(static_cast<uint8_t>(tiers[i]));
      if (tiers[i] != Tier::kPrimary && tiers[i] != Tier::kPeer) continue;
      int64_t& end = tiers[i] == Tier::kPeer ? options.peer_bytes : options.primary_bytes;
      offsets[i] = end;
      end += sizes.ExpertSize(i / kExperts);
    }
    auto opened = std::make_shared<ExpertTiers>(store, kRoutedRoles, kNumLayers, options);
    CHECK_EQ(opened->Place(marks.data(), offsets.data(), homes.data()), "");
    CHECK_EQ(opened->Fill(0, kPairs), options.primary_bytes + options.peer_bytes);
    return opened;
  }

  // Rows whose experts mostly lie among the four from `first_hot` on.
  Inputs Make(int64_t layer, int64_t first_hot, int seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Inputs in{};
    in.layer = layer;
    in.num_rows = 1 + random() % 8;
    in.num_live = random() % 4 == 0 ? random() % (in.num_rows + 1) : in.num_rows;
    const auto fill = [&](std::vector<float>& values, int64_t count) {
      while (count-- > 0) values.push_back(normal(random));
    };
    fill(in.x, in.num_rows * kWidth);
    fill(in.weights, in.num_rows * kActive);
    fill(in.shared_weights, in.num_rows);
    for (int64_t row = 0; row < in.num_rows; ++row) {
      const auto begin = static_cast<int64_t>(in.ids.size());
      while (static_cast<int64_t>(in.ids.size()) < begin + kActive) {
        const int64_t id = random() % 5 == 0 ? random() : first_hot + random() % 4;
        const auto id32 = static_cast<int32_t>(id % kExperts);
        if (std::find(in.ids.begin() + begin, in.ids.end(), id32) == in.ids.end()) {
          in.ids.push_back(id32);
        }
      }
    }
    return in;
  }

  // Calls the op; returns what it returns, the result in *y.
  std::string Call(const Inputs& in, ExpertTiers* tiers, std::vector<float>* y) const {
    y->assign(in.num_rows * kWidth, std::numeric_limits<float>::quiet_NaN());
    const auto get = [&](int64_t role) { return store->Get(role, in.layer); };
    ExpertFfnArgs args = {};
    args.x = in.x.data();
    args.ids = in.ids.data();
    args.weights = in.weights.data();
    args.shared_weights = in.shared_weights.data();
    args.y = y->data();
    args.num_rows = in.num_rows;
    args.num_live = in.num_live;
    args.width = kWidth;
    args.num_active = kActive;
    args.routed = {get(0), get(1), get(2)};
    args.shared = {get(3), get(4), get(5)};
    args.layer = in.layer;
    args.tiers = tiers;
    return ExpertFfn(args);
  }

  // One caller's window: a call of every layer, with the answers that it has without tiers.
  std::vector<Expected> MakeWindow(int window, int caller) const {
    std::vector<Expected> calls;
    for (int64_t layer = 0; layer < kNumLayers; ++layer) {
      const int seed = static_cast<int>((window * 8 + caller) * kNumLayers + layer);
      calls.push_back({Make(layer, window * 2 + layer, seed), {}});
      CHECK_EQ(Call(calls.back().inputs, nullptr, &calls.back().y), "");
    }
    return calls;
  }

  // Every bit as without tiers; returns the routed entries.
  int64_t CheckWindow(const std::vector<Expected>& calls, ExpertTiers* tiers) const {
    int64_t entries = 0;
    std::vector<float> y;
    for (const Expected& call : calls) {
      CHECK_EQ(Call(call.inputs, tiers, &y), "");
      CHECK(SameBits(y, call.y));
      entries += call.inputs.entries();
    }
    return entries;
  }

  const std::shared_ptr<WeightStore> store = std::make_shared<WeightStore>(6, kNumLayers);

 private:
  struct Put {
    int64_t role, layer, offset, num_bytes;
    Matrix matrix;
  };

  void AddLayer(int64_t l) {
    const LayerShape& shape = kLayers[l];
    const int64_t stride = shape.fused ? 2 * shape.hidden : shape.hidden;
    Add(0, l, {nullptr, TypeOf(shape.type), kExperts, shape.hidden, kWidth, stride});
    if (shape.fused) {  // up's rows begin after the first expert's gate
      Put up = puts_.back();
      up.role = 1;
      up.offset += shape.hidden * up.matrix.row_bytes();
      puts_.push_back(up);
    } else {
      Add(1, l, puts_.back().matrix);
    }
    Add(2, l, {nullptr, TypeOf(shape.type), kExperts, kWidth, shape.hidden, kWidth});
    const int64_t hidden = shape.shared_hidden;
    Add(3, l, {nullptr, TypeOf(GgmlType::kQ8_0), 1, hidden, kWidth, hidden});
    Add(4, l, puts_.back().matrix);
    Add(5, l, {nullptr, TypeOf(GgmlType::kQ8_0), 1, kWidth, hidden, kWidth});
  }

  void Add(int64_t role, int64_t layer, Matrix matrix) {
    const int64_t rows = (matrix.count - 1) * matrix.stride + matrix.rows;
    puts_.push_back(
        {role, layer, static_cast<int64_t>(bytes_.size()), rows * matrix.row_bytes(), matrix});
    const int64_t stored = matrix.count * matrix.stride;
    std::normal_distribution<float> normal(0.0f, 0.1f);
    for (int64_t i = 0; i < stored * matrix.row_bytes() / matrix.type->block_bytes; ++i) {
      uint8_t block[34];
      for (uint8_t& byte : block) byte = static_cast<uint8_t>(random_());
      const float value = normal(random_);
      if (matrix.type->form == Form::kFloat) std::memcpy(block, &value, sizeof(value));
      if (matrix.type->form == Form::kPlain) block[1] = 0x10;  // a small half: 2^-11 and more
      bytes_.insert(bytes_.end(), block, block + matrix.type->block_bytes);
    }
  }

  std::mt19937 random_{7};
  std::vector<uint8_t> bytes_;
  std::vector<Put> puts_;
  void* mapping_;
};

}  // namespace strata
