// Experts pass through a ring: each group finds its own, in time or not.
#include <atomic>
#include <numeric>

#include "check.h"
#include "cuda/expert_ring.h"
#include "cuda/expert_word.h"
#include "cuda/lent_slots.h"
#include "cuda/ops/expert_gate.h"

namespace strata {
namespace {

using expert_tiles::AwaitGroup;
using expert_tiles::GateArgs;
using expert_tiles::LeaveRing;
using expert_tiles::RangeOf;
using expert_tiles::TellRouting;

constexpr int64_t kLayers = 3, kExperts = 8, kBytes = 512;

// A model's experts: each filled with a byte of its own, most of them in page-locked memory.
struct Model {
  uint8_t* host = nullptr;
  uint64_t* words = nullptr;
  int32_t* counts = nullptr;
  uint64_t* addresses = nullptr;
  uint32_t* homes = nullptr;
  int32_t* live = nullptr;
  int64_t listed = 0;

  Model() {
    const int64_t all = kLayers * kExperts;
    CHECK(cudaHostAlloc(reinterpret_cast<void**>(&host), all * kBytes, 0) == cudaSuccess);
    CHECK(cudaMalloc(&words, all * 8) == cudaSuccess);
    CHECK(cudaMalloc(&counts, kExperts * 4) == cudaSuccess);
    CHECK(cudaMalloc(&addresses, kExperts * 8) == cudaSuccess);
    CHECK(cudaMalloc(&homes, kEntryHomes * 4) == cudaSuccess);
    CHECK(cudaMalloc(&live, 4) == cudaSuccess);
    cudaMemset(homes, 0, kEntryHomes * 4);
    for (int64_t i = 0; i < all; ++i) {
      std::fill_n(host + i * kBytes, kBytes, static_cast<uint8_t>(i + 1));
      words[i] = ExpertWord(host + i * kBytes, ExpertTag::kLocal, IsListed(i));
      listed += IsListed(i);
    }
    std::fill_n(counts, kExperts, 65);
    *live = 100;
  }
  ~Model() {
    cudaFreeHost(host);
    for (void* memory :
         {static_cast<void*>(words), static_cast<void*>(counts), static_cast<void*>(addresses),
          static_cast<void*>(homes), static_cast<void*>(live)}) {
      cudaFree(memory);
    }
  }

  // Makes a part of a slot.
  ExpertRing::MakePanels Maker() const {
    return [this](int64_t layer, int64_t expert, int64_t part, uint8_t* slot) {
      constexpr int64_t kParts = ExpertStager::kParts;
      const int64_t begin = part * kBytes / kParts, end = (part + 1) * kBytes / kParts;
      std::copy_n(host + (layer * kExperts + expert) * kBytes + begin, end - begin, slot + begin);
    };
  }

  // Those of the second layer are all on the device.
  static bool IsListed(int64_t i) { return i / kExperts != 1 && i % 3 != 0; }

  std::vector<ExpertRing::Entry> FarList() const { return List(kLayers * kExperts + 1, true); }

  // Of every `unpinned`-th the ring is not told where it is.
  std::vector<ExpertRing::Entry> List(int64_t unpinned = kLayers * kExperts + 1,
                                      bool is_far = false) const {
    std::vector<ExpertRing::Entry> list;
    for (int64_t i = 0; i < kLayers * kExperts; ++i) {
      if (!IsListed(i)) continue;
      const uint8_t* from = i % unpinned == unpinned - 1 ? nullptr : host + i * kBytes;
      list.push_back({from, kBytes, i / kExperts, i % kExperts, is_far});
      if (is_far) words[i] = ExpertWord(from, ExpertTag::kPeer, false);
    }
    return list;
  }
};

// `patience_ms`: long on a machine with other work; shorter where a test waits for it to end.
RingSizes SizesOf(int64_t num_slots, int64_t patience_ms = 10000) {
  RingSizes sizes;
  sizes.num_layers = kLayers;
  sizes.num_experts = kExperts;
  sizes.most_listed = 6;
  sizes.num_slots = num_slots;
  sizes.slot_bytes = 1024;
  sizes.min_rows = 64;
  sizes.patience_ms = patience_ms;
  return sizes;
}

// What a program of all layers does, but for products; returns how many came through the ring.
// Experts without entries are not looked at.
int64_t Run(const Model& model, const ExpertRing& ring, int32_t tile_rows = 64) {
  int64_t through_ring = 0;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    GateArgs args;
    args.ring = ring.At(layer);
    args.words = model.words + layer * kExperts;
    args.counts = model.counts;
    args.live = model.live;
    args.addresses = model.addresses;
    args.homes = model.homes;
    args.num_rows = 128;
    args.num_experts = kExperts;
    args.tile_rows = tile_rows;
    CHECK_EQ(TellRouting(args, nullptr), "");
    for (int64_t group = 0; group < ring.groups(); ++group) {
      CHECK_EQ(AwaitGroup(args, group, nullptr), "");
      const auto range = RangeOf(kExperts, ring.groups(), group);
      for (int64_t e = range.first; e < range.end; ++e) {
        if (model.counts[e] == 0) continue;
        const int64_t i = layer * kExperts + e;
        const auto* bytes = reinterpret_cast<const uint8_t*>(model.addresses[e]);
        if (bytes == nullptr) continue;
        CHECK_EQ(bytes[0], static_cast<uint8_t>(i + 1));
        CHECK_EQ(bytes[kBytes - 1], static_cast<uint8_t>(i + 1));
        through_ring += bytes < model.host || bytes >= model.host + kLayers * kExperts * kBytes;
      }
    }
    CHECK_EQ(LeaveRing(args, nullptr), "");
  }
  return through_ring;
}

void ChoosesTheFewestGroupsOfWhichTheRingHoldsTwo() {
  CHECK_EQ(RingGroups(512, 512, 1024), 1);
  CHECK_EQ(RingGroups(512, 340, 680), 1);
  CHECK_EQ(RingGroups(512, 340, 679), 2);
  CHECK_EQ(RingGroups(512, 512, 64), 16);
  CHECK_EQ(RingGroups(16, 16, 2), 16);
}

void EveryGroupFindsItsExperts() {
  for (const int64_t num_slots : {2, 3, 5, 12, 40}) {
    const Model model;
    ExpertRing ring(SizesOf(num_slots));
    CHECK_EQ(ring.SetList(model.List()), "");
    constexpr int kPasses = 20;
    CHECK_EQ(ring.BeginPass(), "");
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass + 1 < kPasses) CHECK_EQ(ring.BeginPass(), "");  // as a queue of two programs
      CHECK_EQ(Run(model, ring), model.listed);
    }
    CHECK_EQ(ring.counts().copied, kPasses * model.listed);
    CHECK_EQ(ring.counts().left_out, 0);
    CHECK_EQ(model.homes[kReadByTiles], 0u);
  }
}

void FewRowsReadOverTheLink() {
  const Model model;
  *model.live = 63;
  ExpertRing ring(SizesOf(4));
  CHECK_EQ(ring.SetList(model.List()), "");
  CHECK_EQ(Run(model, ring), 0);
  CHECK_EQ(model.homes[kReadByTiles], 2u * model.listed);
  CHECK_EQ(Run(model, ring, 160), 0);  // wide tiles hold an expert's 65 entries
  CHECK_EQ(model.homes[kReadByTiles], 3u * model.listed);
}

// Nobody has announced the pass: gates wait once, then read over the link; the next pass is well.
void AGateThatWaitsInVainReadsOverTheLink() {
  const Model model;
  ExpertRing ring(SizesOf(4, 1000));
  CHECK_EQ(ring.SetList(model.List()), "");
  CHECK_EQ(Run(model, ring), 0);
  CHECK_EQ(ring.counts().given_up, model.listed);
  CHECK_EQ(ring.BeginPass(), "");
  CHECK_EQ(ring.BeginPass(), "");
  CHECK_EQ(Run(model, ring), model.listed);
  CHECK_EQ(ring.counts().left_out, model.listed);
  CHECK_EQ(ring.SetList(model.List()), "");
  CHECK_EQ(ring.counts().given_up, model.listed);
}

// What has no panels is made on the way, every one of them or one here and there.
void UnpinnedExpertsAreStaged() {
  for (const int64_t unpinned : {1, 2, 5}) {
    for (const int64_t num_slots : {2, 5, 40}) {
      const Model model;
      RingSizes sizes = SizesOf(num_slots);
      sizes.stager_threads = 2;
      ExpertRing ring(sizes, model.Maker());
      for (int turn = 0; turn < 2; ++turn) {
        CHECK_EQ(ring.SetList(model.List(unpinned)), "");
        CHECK_EQ(ring.BeginPass(), "");
        for (int pass = 0; pass < 10; ++pass) {
          CHECK_EQ(ring.BeginPass(), "");
          CHECK_EQ(Run(model, ring), model.listed);
        }
      }
      CHECK_EQ(ring.counts().left_out, 0);
      CHECK_EQ(ring.counts().given_up, 0);
    }
  }
}

// A disk that is slower than a gate's patience is no fault: there are signs of life.
void AGateWaitsForASlowDisk() {
  const Model model;
  RingSizes sizes = SizesOf(4, 600);
  sizes.stager_threads = 1;
  std::atomic<int64_t> made{0};
  ExpertRing ring(sizes, [&](int64_t layer, int64_t expert, int64_t part, uint8_t* slot) {
    ++made;
    std::this_thread::sleep_for(std::chrono::milliseconds(80));
    model.Maker()(layer, expert, part, slot);
  });
  CHECK_EQ(ring.SetList(model.List(2)), "");
  CHECK_EQ(ring.BeginPass(), "");
  CHECK_EQ(Run(model, ring), model.listed);
  CHECK_EQ(ring.counts().given_up, 0);
  CHECK(80 * made > sizes.patience_ms);
}

// Slots of experts that no row has chosen come back without a copy, as far as copies are not ahead.
void UnroutedExpertsAreNotCopied() {
  for (const int64_t unpinned : {1, 2, 100}) {
    const Model model;
    for (int e = 0; e < kExperts; ++e) model.counts[e] = e % 2 == 0;
    RingSizes sizes = SizesOf(4);
    sizes.stager_threads = 1;
    ExpertRing ring(sizes, model.Maker());
    CHECK_EQ(ring.SetList(model.List(unpinned)), "");
    constexpr int kPasses = 10;
    int64_t routed = 0;
    for (int64_t i = 0; i < kLayers * kExperts; i += 2) routed += Model::IsListed(i);
    for (int pass = 0; pass < kPasses; ++pass) {
      CHECK_EQ(ring.BeginPass(), "");
      CHECK_EQ(Run(model, ring), routed);
    }
    const ExpertRing::Counts counts = ring.counts();
    CHECK_EQ(counts.copied + counts.unrouted, kPasses * model.listed);
    // Copies are a ring's length ahead at most: of 11 entries 4 of the first layer, 4 of the third.
    CHECK(counts.unrouted >= kPasses);
    CHECK_EQ(counts.left_out, 0);
    std::fill_n(model.counts, kExperts, 1);  // and the next pass finds all of them
    CHECK_EQ(ring.BeginPass(), "");
    CHECK_EQ(Run(model, ring), model.listed);
  }
}

// An issuer that is late finds the next pass's routing, which is not that of what it copies.
void RoutingOfALaterPassSkipsNothingThatIsNeeded() {
  const Model model;
  ExpertRing ring(SizesOf(4, 1000));
  CHECK_EQ(ring.SetList(model.List()), "");
  std::fill_n(model.counts, kExperts, 0);
  CHECK_EQ(Run(model, ring), 0);  // nobody copies: given up
  std::fill_n(model.counts, kExperts, 1);
  CHECK_EQ(ring.BeginPass(), "");
  CHECK_EQ(ring.BeginPass(), "");
  CHECK_EQ(Run(model, ring), model.listed);
  CHECK_EQ(ring.counts().left_out, model.listed);
  CHECK_EQ(ring.counts().unrouted, 0);
}

// Where they lie they are not to be read: who waits in vain says that rows went without them.
void ExpertsOfADeviceThatIsNotReachedAreCopiedOrMissed() {
  const Model model;
  RingSizes sizes = SizesOf(4, 1000);
  sizes.far_device = 1;
  ExpertRing ring(sizes);
  CHECK_EQ(ring.SetList(model.FarList()), "");
  for (int pass = 0; pass < 3; ++pass) {
    CHECK_EQ(ring.BeginPass(), "");
    CHECK_EQ(Run(model, ring), model.listed);
    CHECK(!ring.TakeMissed());
  }
  CHECK_EQ(Run(model, ring), 0);  // nobody has announced it
  CHECK(ring.TakeMissed());
  CHECK(!ring.TakeMissed());
  CHECK_EQ(ring.SetList(model.FarList()), "");
  CHECK_EQ(ring.BeginPass(), "");
  CHECK_EQ(Run(model, ring), model.listed);
}

void APassThatNeverRanIsForgotten() {
  const Model model;
  ExpertRing ring(SizesOf(4));
  for (int turn = 0; turn < 3; ++turn) {
    CHECK_EQ(ring.SetList(model.List()), "");
    CHECK_EQ(ring.BeginPass(), "");  // an error before its first layer
    CHECK_EQ(ring.SetList(model.List()), "");
    CHECK_EQ(ring.BeginPass(), "");
    CHECK_EQ(Run(model, ring), model.listed);
  }
}

// Words that say so earlier would let kernels read slots that hold something else.
void SlotsStayLentUntilTheyAreFilledAgain() {
  constexpr int64_t kBig = 2 * kBytes;
  uint8_t *slots = nullptr, *homes = nullptr;
  CHECK(cudaMalloc(&slots, 2 * kBig) == cudaSuccess);
  CHECK(cudaHostAlloc(reinterpret_cast<void**>(&homes), 2 * kBig, 0) == cudaSuccess);
  std::fill_n(homes, 2 * kBig, uint8_t{7});
  std::vector<uint64_t> table = {ExpertWord(slots, ExpertTag::kLocal, false),
                                 ExpertWord(slots + kBig, ExpertTag::kLocal, false)};
  const std::vector<uint64_t> before = table;
  LentSlots lent;
  lent.Add(&table, 0, homes, kBytes);
  lent.Add(&table, 1, homes + kBig, kBig);
  lent.Lend(ExpertTag::kHost);
  const std::vector<uint64_t> away = table;
  emulate::SetCopyLimit(kBytes);  // the second one's copy fails
  CHECK(lent.GiveBack() != "");
  CHECK(lent.is_lent());
  CHECK(table == away);
  emulate::SetCopyLimit(SIZE_MAX);
  CHECK_EQ(lent.GiveBack(), "");
  CHECK(!lent.is_lent());
  CHECK(table == before);
  CHECK(slots[0] == 7 && slots[2 * kBig - 1] == 7);
  cudaFree(slots);
  cudaFreeHost(homes);
}

void GivesEverythingBack() {
  const size_t device = emulate::DeviceBytes(), pinned = emulate::PinnedBytes();
  {
    RingSizes sizes = SizesOf(4);
    sizes.stager_threads = 2;
    const ExpertRing ring(sizes, [](int64_t, int64_t, int64_t, uint8_t*) {});
    CHECK(emulate::DeviceBytes() > device);
  }
  CHECK_EQ(emulate::DeviceBytes(), device);
  CHECK_EQ(emulate::PinnedBytes(), pinned);
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(ChoosesTheFewestGroupsOfWhichTheRingHoldsTwo);
  RUN(EveryGroupFindsItsExperts);
  RUN(FewRowsReadOverTheLink);
  RUN(AGateThatWaitsInVainReadsOverTheLink);
  RUN(UnpinnedExpertsAreStaged);
  RUN(AGateWaitsForASlowDisk);
  RUN(UnroutedExpertsAreNotCopied);
  RUN(RoutingOfALaterPassSkipsNothingThatIsNeeded);
  RUN(ExpertsOfADeviceThatIsNotReachedAreCopiedOrMissed);
  RUN(APassThatNeverRanIsForgotten);
  RUN(SlotsStayLentUntilTheyAreFilledAgain);
  RUN(GivesEverythingBack);
  return 0;
}
