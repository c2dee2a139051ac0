// Experts on a peer: the same bits on either device and either way, and nothing left behind.
#include "cuda/peer_store.h"
#include "doors_model.h"
#include "float_bits.h"

namespace strata {
namespace {

constexpr int64_t kSlots = 4;

struct Way {
  int device;
  bool through_host;
};

constexpr Way kWays[] = {{0, false}, {0, true}, {1, false}, {1, true}};

// Every third expert is the peer's.
std::shared_ptr<DeviceStore> WithPeer(const DoorsModel& model, const Way& way) {
  auto store = model.Store();
  CHECK_EQ(store->OpenDoors(kRows, kActive, model.sizes.width), "");
  const int64_t hidden = std::max(model.sizes.hidden, model.sizes.shared_hidden);
  CHECK_EQ(store->OpenPeer(way.device, way.through_host, kSlots * model.shape.bytes, hidden, kRows),
           "");
  for (int64_t i = 0; i < kSlots; ++i)
    model.Put(*store, 3 * i, Arena::kPeer, i * model.shape.bytes);
  CHECK_EQ(store->PublishExperts(), "");
  return store;
}

// Kernels built for a layer's types look, where devices reach each other's memory.
bool CanLook(const DoorsModel& model, const Way& way) {
  return model.sizes.width == kInlined.width && !way.through_host;
}

// `looks`: the second kernel looks for the peer's rows where it can, and does not start behind
// them.
std::vector<float> Run(DoorsModel& model, DeviceStore& store, const Way& way, bool looks) {
  std::vector<float> y(kRows * model.sizes.width, -7.0f);
  ExpertFfnArgs args = model.Args(store, y.data());
  args.doors = true;
  args.streamed = store.doors()->streamed.data();
  args.homes = store.doors()->homes;
  args.peer_rows = store.peer()->rows();
  if (looks) CHECK_EQ(store.peer()->ShareCard(&args), "");
  CHECK_EQ(args.bell.tellers > 0, looks && CanLook(model, way));
  CHECK_EQ(store.peer()->Fork(args, nullptr), "");
  CHECK_EQ(ExpertGateUp(args, nullptr), "");
  CHECK_EQ(store.peer()->Join(nullptr), "");
  CHECK_EQ(ExpertDown(args, nullptr), "");
  CHECK_EQ(store.peer()->aborted(), false);
  return y;
}

void CheckSameBits(const std::vector<float>& got, const std::vector<float>& expected) {
  CHECK_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) CHECK_EQ(BitsOf(got[i]), BitsOf(expected[i]));
}

void TestARowHasTheSameBitsOnEitherDeviceAndEitherWay() {
  for (const DoorsSizes& sizes : {kInlined, kGeneral}) {
    DoorsModel model(sizes);
    for (const int32_t live : {kRows, int64_t{1}, int64_t{0}}) {
      model.live = live;
      const std::vector<float> expected = model.WithoutDoors();
      for (const Way& way : kWays) {
        const auto store = WithPeer(model, way);
        for (const uint64_t order : {0, 1, 7}) {
          emulate::SetOrder(order);
          for (const bool looks : {true, false})
            CheckSameBits(Run(model, *store, way, looks), expected);
        }
        emulate::SetOrder(0);
        int device = -1;
        cudaGetDevice(&device);
        CHECK_EQ(device, 0);
        int64_t used = 0;
        for (const uint32_t count : store->TakeUsage()) used += count;
        CHECK_EQ(used, 6 * live * kActive);
        int64_t on_peer = 0;
        for (int64_t i = 0; i < live * kActive; ++i) on_peer += model.ids[i] % 3 == 0;
        const std::vector<uint32_t> homes = store->TakeHomes();
        CHECK_EQ(int64_t{homes[kOnPeer]}, 6 * on_peer);
      }
    }
  }
}

void TestAnAuditSeesThePeersSlots() {
  DoorsModel model(kInlined);
  for (const Way& way : kWays) {
    const auto store = WithPeer(model, way);
    for (int64_t e = 0; e < kExperts; ++e) CHECK_EQ(model.Audit(*store, e), "");
    store->peer()->arena()[model.shape.bytes + 8] ^= 1;
    CHECK_EQ(model.Audit(*store, 3), "expert 3 of layer 0: its gate is not the file's");
    CHECK_EQ(model.Audit(*store, 6), "");
  }
}

void TestEverythingIsGivenBack() {
  DoorsModel model(kGeneral);
  const size_t device = emulate::DeviceBytes(), pinned = emulate::PinnedBytes();
  for (const Way& way : kWays) WithPeer(model, way);
  CHECK_EQ(emulate::DeviceBytes(), device);
  CHECK_EQ(emulate::PinnedBytes(), pinned);
}

void TestSaysWhatItCannotBe() {
  DoorsModel model(kGeneral);
  const auto store = model.Store();
  CHECK_CONTAINS(store->OpenPeer(1, false, 0, 256, kRows), "behind the doors");
  CHECK_EQ(store->OpenDoors(kRows, kActive, 256), "");
  CHECK_CONTAINS(store->OpenPeer(2, false, 0, 256, kRows), "peer: a device: ");
  CHECK_CONTAINS(store->OpenPeer(1, false, int64_t{1} << 40, 256, kRows),
                 "the experts' arena of 1048576 MiB failed (out of memory); device 1 has ");
  CHECK_EQ(store->OpenPeer(1, false, 0, 256, kRows - 1), "");
  std::vector<float> y(kRows * 256);
  CHECK_CONTAINS(store->peer()->Fork(model.Args(*store, y.data()), nullptr),
                 "3 rows of 256 with 5 experts, it has room for 2 of 256 with 5");
  cudaGetLastError();
}

}  // namespace
}  // namespace strata

int main() {
  using namespace strata;
  RUN(TestARowHasTheSameBitsOnEitherDeviceAndEitherWay);
  RUN(TestAnAuditSeesThePeersSlots);
  RUN(TestEverythingIsGivenBack);
  RUN(TestSaysWhatItCannotBe);
}
