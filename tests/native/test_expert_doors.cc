// Entries of expert_ffn that others compute: the same bits whoever does.
#include <cstring>

#include "cuda/host_workers.h"
#include "doors_model.h"
#include "float_bits.h"

namespace strata {
namespace {

void CheckSameBits(const std::vector<float>& got, const std::vector<float>& expected) {
  CHECK_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) CHECK_EQ(BitsOf(got[i]), BitsOf(expected[i]));
}

std::vector<uint8_t> Streamed(int64_t most) {
  std::vector<uint8_t> streamed(kActive + 1);
  for (int64_t n = 0; n <= kActive; ++n) streamed[n] = static_cast<uint8_t>(std::min(n, most));
  return streamed;
}

void Open(DeviceStore& store, const DoorsModel& model) {
  CHECK_EQ(store.OpenDoors(kRows, kActive, model.sizes.width), "");
}

void Through(const Doors& doors, ExpertFfnArgs* args) {
  args->doors = true;
  args->homes = doors.homes;
  args->mailbox = doors.mailbox;
  args->streamed = doors.streamed.data();
}

// The rows of the entries of all experts that `mine` says, as a peer computes them.
template <typename Mine>
std::vector<float> RowsOf(DoorsModel& model, const Mine& mine) {
  const auto store = model.Store();
  Open(*store, model);
  for (int64_t e = 0; e < kExperts; ++e) {
    if (mine(e)) CHECK_EQ(store->SetTag(0, e, ExpertTag::kPeer), "");
  }
  CHECK_EQ(store->PublishExperts(), "");
  std::vector<float> rows(kRows * kActive * model.sizes.width, -7.0f);
  ExpertFfnArgs args = model.Args(*store, nullptr);
  Through(*store->doors(), &args);
  args.weights = args.shared_weights = nullptr;
  args.usage = nullptr;
  args.rows = rows.data();
  CHECK_EQ(ExpertGateUp(args, nullptr), "");
  CHECK_EQ(ExpertDown(args, nullptr), "");
  return rows;
}

void TestAPeerStoresTheRowsOfItsOwnExpertsOnly() {
  for (const DoorsSizes& sizes : {kInlined, kGeneral}) {
    DoorsModel model(sizes);
    model.live = kRows - 1;
    const std::vector<float> all = RowsOf(model, [](int64_t) { return true; });
    const std::vector<float> some = RowsOf(model, [](int64_t e) { return e % 3 == 0; });
    for (size_t entry = 0; entry < model.ids.size(); ++entry) {
      const bool is_live = entry < static_cast<size_t>(model.live * kActive);
      const bool stored = is_live && model.ids[entry] % 3 == 0;
      for (int64_t i = 0; i < sizes.width; ++i) {
        const size_t at = entry * sizes.width + i;
        CHECK_EQ(BitsOf(some[at]), BitsOf(stored ? all[at] : -7.0f));
      }
    }
  }
}

void TestARowHasTheSameBitsWhoeverComputesItsEntries() {
  for (const DoorsSizes& sizes : {kInlined, kGeneral}) {
    DoorsModel model(sizes, 3);
    const std::vector<float> expected = model.WithoutDoors();
    const std::vector<float> rows = RowsOf(model, [](int64_t) { return true; });
    for (const int64_t streamed : {0, 1, 9}) {
      const auto store = model.Store();
      Open(*store, model);
      CHECK_EQ(store->StartHost(2, 60000), "");
      CHECK_EQ(store->SetStreamed(Streamed(streamed)), "");
      for (int64_t e = 0; e < kExperts; ++e) {
        const ExpertTag tag = e % 4 == 1   ? ExpertTag::kPeer
                              : e % 2 == 0 ? ExpertTag::kHost
                                           : ExpertTag::kLocal;
        CHECK_EQ(store->SetTag(0, e, tag), "");
      }
      CHECK_EQ(store->PublishExperts(), "");
      std::vector<float> y(expected.size());
      ExpertFfnArgs args = model.Args(*store, y.data());
      Through(*store->doors(), &args);
      args.peer_rows = rows.data();
      for (int turn = 0; turn < 3; ++turn) CheckSameBits(model.Run(args), expected);
      int64_t used = 0;
      for (const uint32_t count : store->TakeUsage()) used += count;
      CHECK_EQ(used, 3 * kRows * kActive);
      const std::vector<uint32_t> homes = store->TakeHomes();
      CHECK_EQ(homes[kOnPrimary] + homes[kOnPeer] + homes[kOverLink] + homes[kOnHost], used);
      CHECK_EQ(homes[kOnHost], store->host()->entries());
      CHECK_EQ(homes[kOnHost] > 0, streamed < 9);
    }
  }
}

void TestALostThreadEndsTheWaitAndTheNextCallIsRight() {
  DoorsModel model(kInlined, 5);
  const std::vector<float> expected = model.WithoutDoors();
  const auto store = model.Store();
  Open(*store, model);
  CHECK_EQ(store->StartHost(2, 60000), "");
  CHECK_EQ(store->SetStreamed(Streamed(0)), "");
  for (int64_t e = 0; e < kExperts; ++e) CHECK_EQ(store->SetTag(0, e, ExpertTag::kHost), "");
  CHECK_EQ(store->PublishExperts(), "");
  std::vector<float> y(expected.size());
  ExpertFfnArgs args = model.Args(*store, y.data());
  Through(*store->doors(), &args);

  Stall& stall = store->host()->stall();
  stall.Ask(std::chrono::milliseconds(50));  // late, but within the time
  CheckSameBits(model.Run(args), expected);
  CHECK(!store->aborted());

  constexpr std::chrono::minutes kForGood{30};
  store->SetTimeout(100);
  stall.Ask(kForGood);
  model.Run(args);
  CHECK(store->aborted());
  store->SetTimeout(std::chrono::milliseconds(kForGood).count());
  model.Run(args);           // nobody waits any more
  CHECK(!store->Recover());  // still away
  stall.Ask({});
  bool recovered = store->Recover();
  for (int i = 0; i < 60 && !recovered; ++i) recovered = store->Recover();
  CHECK(recovered);
  CHECK(!store->aborted());
  for (int turn = 0; turn < 3; ++turn) CheckSameBits(model.Run(args), expected);
}

void TestDoorsRefuseWhatTheyCannotBeFor() {
  DoorsModel model(kGeneral);
  const auto store = model.Store();
  CHECK_CONTAINS(store->SetTag(0, 1, ExpertTag::kHost), "no doors");
  CHECK_CONTAINS(store->OpenDoors(kRows, 33, 256), "1 to 32");
  CHECK_CONTAINS(store->StartHost(1, 1000), "behind open doors");
  CHECK_EQ(store->OpenDoors(kRows, 2, 256), "");
  CHECK_CONTAINS(store->SetTag(0, 1, ExpertTag::kHost), "no threads");
  CHECK_CONTAINS(store->SetStreamed({0, 1, 3}), "more than all misses");
  CHECK_CONTAINS(store->SetStreamed({0, 1}), "3 expected");
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(TestAPeerStoresTheRowsOfItsOwnExpertsOnly);
  RUN(TestARowHasTheSameBitsWhoeverComputesItsEntries);
  RUN(TestALostThreadEndsTheWaitAndTheNextCallIsRight);
  RUN(TestDoorsRefuseWhatTheyCannotBeFor);
}
