// Experts of the host's or a peer's memory on their way through a ring of slots on the device, for
// prompts.
//
// A pass is one run of a prompt's program with at least `min_rows` live rows. It needs every expert
// that lies in page-locked memory, on another device or in the file once, in an order that is known
// before it begins: by layer, then by expert. What is in the file, or in RAM that could not be
// page-locked, is made into panels in page-locked buffers by threads of the host, ahead of its copy
// (expert_stager.h). So the copy engine runs ahead of the layers, through attention
// and delta net: a thread of the host, the issuer, puts entry n of the order into slot n %
// num_slots as soon as that slot is free. Passes follow one another without a gap, n counts through
// them.
//
// A layer's experts are computed in `groups` of neighbours. A gate, a kernel in front of a group's
// products, waits until the group has arrived, and tells the products where it lies; it gives the
// slots of the group before it back, whose products are over in stream order. A kernel behind the
// last group gives back the rest.
//
// An expert that no row has chosen needs no copy. Routing is known when a layer's router is done; a
// kernel tells the issuer then, which leaves out what is not copied yet: entry n stays in the
// order, its slot stays as it was, and nobody reads it. Where copies bind, they are as far as the
// layers are, so of a layer nearly all can be left out; for that the issuer keeps but a few copies
// in the engine's queue. Where the layers bind, copies are ahead and cost nothing.
//
// Words, and who writes them:
//   RingState, in the device's memory
//      0  base     the kernel behind a pass's last layer: entries of the passes that are over
//      8  arrived  the copy engine, 8 bytes from page-locked memory: entries copied
//     16  late     gates: entries they did not wait for to the end
//     24  given_up gates: what `arrived` was when they stopped waiting
//   RingWords, in page-locked memory
//      0  freed    gates: entries whose slots may be written again
//      8  missed   gates: not 0 when rows went without an expert that only copies bring here
//     64  told     the kernel behind a layer's grouping: entries whose routing is known
//    128  beat     the stager's threads: changes with what they do
//    192  masks    that kernel: a bit for each of a layer's experts, whether a row has chosen it
//
// Order. `arrived` is copied behind the panels on the same stream, so whoever reads it with acquire
// finds them. `freed` is stored with release behind the kernels that read the slots, and the issuer
// reads it with acquire before it asks for the next copy into one of them. `told` is stored with
// release behind a layer's masks. They are those of entry n from `told` > n on until the layer's
// kernel of the next pass, before which n was freed: so whoever reads the masks looks at `freed`
// afterwards, and heeds them only if n was not. All three words grow only.
//
// A gate waits for the copy engine, which needs no processor of the GPU, and for the issuer, a
// thread of the CPU: never for work of a GPU. It cannot wait for itself: entries up to its group's
// end need slots of entries that lie num_slots back, and as the ring holds two groups those belong
// to groups that were given back. Where nothing arrives for `patience`, the issuer being lost or
// the driver busy, and the stager makes nothing, either, a gate stops waiting: the group is read
// over the link, with the same bits (what is in the file is asked for as for few rows,
// file_stage.h), and the issuer, which sees entries freed that it has not copied, leaves them out.
// A late copy harms nobody: it is in front of the next one into its slot, on one stream. Only
// experts of a device whose memory is not reached (`far_device`, staged_copies.h) cannot be read:
// their rows are left out, `missed` is raised, and the step's results mean nothing.
//
// Words of experts may change between passes only (device_store.h).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/expert_stager.h"
#include "cuda/launch.h"
#include "cuda/staged_copies.h"

namespace strata {

struct RingState {
  uint64_t base;
  uint64_t arrived;
  uint64_t late;
  uint64_t given_up;
};

struct RingWords {
  alignas(64) uint64_t freed;
  uint64_t missed;
  alignas(64) uint64_t told;
  alignas(64) uint64_t beat;
  alignas(64) uint32_t masks[16];  // as many as there are
};
static_assert(offsetof(RingWords, masks) == 192);

inline constexpr uint32_t kNotListed = UINT32_MAX;

// What kernels of a layer are told.
struct RingAt {
  RingState* state = nullptr;        // null: there is no ring
  const uint32_t* places = nullptr;  // [E]: of each expert in the pass's order, or kNotListed
  const uint32_t* bounds = nullptr;  // [groups + 1]: where groups begin in that order
  uint8_t* slots = nullptr;
  RingWords* words = nullptr;  // mapped
  int64_t slot_bytes = 0;
  int32_t num_slots = 0;
  int32_t groups = 1;
  int32_t min_rows = 0;
  int32_t patience_ms = 0;
  int32_t first_mask = 0;
  bool is_last = false;     // of the model's layers
  bool has_stager = false;  // experts of the file pass, too
  bool is_far = false;      // a peer's experts are not to be read where they lie
};

struct RingSizes {
  int64_t num_layers = 0;
  int64_t num_experts = 0;  // of a layer
  int64_t most_listed = 0;  // of a layer's experts, in any list
  int64_t num_slots = 0;
  int64_t slot_bytes = 0;
  int64_t min_rows = 0;
  int64_t patience_ms = 0;
  int stager_threads = 0;     // 0: every expert has panels somewhere
  uint8_t* memory = nullptr;  // for slots, the caller's; null: the ring takes its own
  int far_device = -1;        // that this one does not reach, if there is one
};

// Of a layer: the fewest of which the ring holds two, one that is computed and one that arrives.
int64_t RingGroups(int64_t num_experts, int64_t most_listed, int64_t num_slots);

class ExpertRing {
 public:
  // One expert to copy.
  struct Entry {
    const uint8_t* from;  // null: the stager makes it
    int64_t bytes;
    int64_t layer;
    int64_t expert;
    bool is_far = false;  // in the far device's memory
  };
  struct Counts {
    int64_t passes = 0;
    int64_t copied = 0;
    int64_t bytes = 0;
    int64_t unrouted = 0;   // left out because no row had chosen them
    int64_t left_out = 0;   // because they came too late
    int64_t given_up = 0;   // what gates did not wait for to the end; it was read over the link
    int64_t waited_us = 0;  // for free slots
  };

  // Writes the panels of one of an expert's matrices to where they belong in a slot.
  using MakePanels =
      std::function<void(int64_t layer, int64_t expert, int64_t part, uint8_t* slot)>;

  // On the current device. `make` is asked for with a stager only. Throws std::runtime_error with
  // numbers.
  explicit ExpertRing(const RingSizes& sizes, MakePanels make = nullptr);
  ~ExpertRing();
  ExpertRing(const ExpertRing&) = delete;
  ExpertRing& operator=(const ExpertRing&) = delete;

  const RingSizes& sizes() const { return sizes_; }
  int64_t groups() const { return groups_; }
  RingAt At(int64_t layer) const;

  // What every pass from now on needs, in order. No pass may be under way on the device; one that
  // was begun and never ran is forgotten.
  std::string SetList(std::vector<Entry> list);
  // A program with enough rows is about to be put into the queue. Returns what went wrong since.
  std::string BeginPass();

  // Asks the device.
  Counts counts();
  // Whether rows went without their experts since it was asked last.
  bool TakeMissed();

 private:
  void Release();
  void Loop();
  void Issue();
  std::string OpenStager(MakePanels make);
  std::string OpenFar();
  bool AwaitSlot();
  bool AwaitEngine();
  bool IsUnrouted(uint64_t n) const;
  void Copy(const Entry& entry);
  void Announce();
  void Fail(const char* what, cudaError_t error);
  int64_t Late() const;
  uint64_t Freed() const { return __atomic_load_n(&words_->freed, __ATOMIC_ACQUIRE); }

  RingSizes sizes_;
  int64_t groups_;
  int device_ = 0;
  uint8_t* slots_ = nullptr;
  uint8_t* owned_slots_ = nullptr;
  RingState* state_ = nullptr;
  uint32_t* places_ = nullptr;  // [layers, experts]
  uint32_t* bounds_ = nullptr;  // [layers * groups + 1]
  RingWords* words_ = nullptr;
  RingWords* words_on_device_ = nullptr;  // the same
  uint64_t* numbers_ = nullptr;           // page-locked, on their way to `arrived`
  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, 3> batches_ = {};  // behind the newest announcements, in turns
  std::unique_ptr<ExpertStager> stager_;

  std::unique_ptr<StagedCopies> far_;
  std::vector<Entry> list_;
  std::vector<bool> ends_group_;
  uint64_t issued_ = 0;
  uint64_t announced_ = 0;
  uint64_t num_batches_ = 0;
  std::atomic<uint64_t> target_{0};
  std::atomic<bool> abandon_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;  // these under mutex_
  bool busy_ = false;
  std::string error_;
  Counts counts_;
  std::thread issuer_;
};

}  // namespace strata
