// Matrices in the primary's memory, as panels, by role and layer; and where every expert's lie.
//
// Doors: what a store needs whose experts may be computed elsewhere, by a peer or by the host. They
// are opened once, before any program is compiled; a store without them runs kernels that know of
// no doors.
//
// Memory: one arena for matrices and one for experts, allocated once, never moved: captured graphs
// hold addresses. Experts that are not on the device lie in a second, page-locked arena of the host
// that the device reads over its link. `experts` is a table in device memory, one word for each
// (layer, expert) (expert_word.h), which kernels read at run time; changing it between steps moves
// an expert without touching a program or a graph.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/gguf_types.h"
#include "cuda/device_swaps.h"
#include "cuda/expert_ring.h"
#include "cuda/expert_word.h"
#include "cuda/launch.h"
#include "cuda/lent_slots.h"
#include "cuda/mailbox.h"
#include "cuda/panel_copier.h"
#include "cuda/timeline.h"
#include "weights/weight_store.h"

namespace strata {

class PeerStore;
class PeerAttention;
class PeerTiles;
struct PeerAttentionSizes;

// `count` matrices [rows, cols] of `bytes_each` bytes as panels of 32 rows (panels.h).
struct DeviceMatrix {
  const uint8_t* bytes = nullptr;  // device
  const TypeInfo* type = nullptr;
  int64_t count = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t unit_bytes = 0;  // of a full segment of 256 values in 32 rows
  int64_t panel_bytes = 0;
  int64_t bytes_each = 0;

  int64_t panels() const { return (rows + 31) / 32; }
  int64_t segments() const { return (cols + 255) / 256; }
  bool quantised() const { return type->form != Form::kFloat; }
};

// Shape of a matrix of these sizes, without memory.
DeviceMatrix ShapeOf(const TypeInfo* type, int64_t count, int64_t rows, int64_t cols);

// The three matrices of a layer's experts, and where each begins inside an expert.
struct ExpertShape {
  DeviceMatrix gate, up, down;  // `bytes` unused
  int64_t up_at = 0;
  int64_t down_at = 0;
  int64_t bytes = 0;
};

// What kernels are told of entries that others compute, in windows of up to `window_rows` rows.
struct Doors {
  int64_t window_rows = 0;
  int64_t num_active = 0;
  int64_t width = 0;
  uint32_t* homes = nullptr;             // [kEntryHomes], device
  MailboxAt mailbox;                     // without a box until the host's threads are there
  std::vector<uint8_t> streamed;         // [num_active + 1], of so many misses of a window's row
  std::vector<uint8_t> streamed_always;  // the same for tiles: all
};

// Memory for experts' panels; numbered as the tiers of strata_jax/weights/placement.py.
enum class Arena : int32_t { kHost = 0, kDevice = 1, kPeer = 2, kFile = 3 };

// What OpenRing is told.
struct RingPlan {
  int64_t num_slots = 0;
  int64_t min_rows = 0;  // live rows of a program from which on experts pass the ring
  int64_t patience_ms = 0;
  int num_threads = 0;   // that make panels of what is in the file
  int64_t lent_at = -1;  // offset in the primary's arena from which on it is lent; -1: nothing is
  int64_t scratch_bytes = 0;  // behind the ring's slots, for programs of more than
  int64_t scratch_above = 0;  // so many rows
};

class FileStage;
class HostWorkers;

class DeviceStore {
 public:
  // Sizes in bytes. Throws std::runtime_error with numbers where memory is short.
  DeviceStore(int64_t num_roles, int64_t num_layers, int64_t num_experts, int64_t matrix_bytes,
              int64_t expert_bytes, int64_t host_expert_bytes);
  ~DeviceStore();
  DeviceStore(const DeviceStore&) = delete;
  DeviceStore& operator=(const DeviceStore&) = delete;

  // Copies a matrix of raw GGUF rows (`stride` rows from one of `count` to the next). What Put and
  // PutExpert copy has landed after the next PublishExperts; until then the rows must stay.
  std::string Put(int64_t role, int64_t layer, const DeviceMatrix& shape, int64_t stride,
                  const uint8_t* raw);
  const DeviceMatrix* Get(int64_t role, int64_t layer) const;

  std::string PutExpertShape(int64_t layer, const ExpertShape& shape);
  const ExpertShape* GetExpertShape(int64_t layer) const;
  // Copies one expert to `offset` of an arena; its table entries follow with PublishExperts.
  std::string PutExpert(int64_t layer, int64_t expert, Arena arena, int64_t offset,
                        const uint8_t* gate, const uint8_t* up, const uint8_t* down);
  // An expert that stays in the file (file_stage.h): threads of the host are to be there, too.
  std::string PutFileExpert(int64_t layer, int64_t expert, const uint8_t* gate, const uint8_t* up,
                            const uint8_t* down);
  // Who computes an expert that has been put, or that lies elsewhere; follows with PublishExperts.
  std::string SetTag(int64_t layer, int64_t expert, ExpertTag tag);
  std::string PublishExperts();

  // All of these before anything is compiled.
  std::string OpenDoors(int64_t window_rows, int64_t num_active, int64_t width);
  // Threads that compute experts with the tag kHost, and how long kernels wait for a sign of life.
  std::string StartHost(int num_threads, int64_t timeout_ms);
  // Behind them: the threads that make panels of such experts for tiles.
  std::string StartFiles(int num_threads, int64_t timeout_ms);
  FileStage* files() const { return files_.get(); }
  bool HasFiles(int64_t layer) const { return files_ != nullptr && !in_file_[layer].empty(); }
  void SetTimeout(int64_t timeout_ms);
  // Of a row's n misses `streamed[n]` are read over the link; all of them until this is called.
  std::string SetStreamed(const std::vector<uint8_t>& streamed);
  // Seconds for a byte of page-locked memory over the link, measured; 0 if that is impossible.
  double LinkSecondsPerByte();
  HostWorkers* host() const { return host_.get(); }
  // Lets experts change places from now on; after the last tag.
  std::string StartSwaps(const SwapSettings& settings);
  // Room for a layer's expert at these offsets of a device's arena and of the host's.
  std::string AddSpares(int64_t layer, Arena arena, int64_t offset, int64_t on_host);
  DeviceSwaps* swaps() const { return swaps_.get(); }
  // Between windows, when one has ended.
  std::string AfterWindow();
  // Of the second kernel of a layer's expert_ffn, in windows.
  Latch LatchAfter(int64_t layer) const;
  // Where an expert is, as the next windows will have it.
  Arena ArenaOf(int64_t layer, int64_t expert) const {
    const uint64_t word = table_[layer * num_experts_ + expert];
    if ((word & kLinked) != 0) return Arena::kHost;
    if ((word & kFromFile) != 0) return Arena::kFile;
    return (word & kTagMask) == uint64_t{0} ? Arena::kDevice : Arena::kPeer;
  }
  // Whether a kernel gave up waiting for the host.
  bool aborted() const;
  // Makes the host's tier fit for use again, with no step under way; false if a thread is still
  // lost.
  bool Recover();
  const Doors* doors() const { return doors_.window_rows > 0 ? &doors_ : nullptr; }
  // Behind the doors, before anything is compiled: experts on another device, or on this one again
  // (peer_store.h). `hidden` is the width of the widest expert, `most_rows` that of a tile.
  std::string OpenPeer(int device, bool through_host, int64_t expert_bytes, int64_t hidden,
                       int64_t most_rows);
  PeerStore* peer() const { return peer_.get(); }

  // An expert of the primary whose slot prompts borrow (lent_slots.h), and where in the host's
  // arena its home is, which is made with the next PublishExperts; it has been put, before the
  // ring.
  std::string LendExpert(int64_t layer, int64_t expert, int64_t home);
  // What the peer does in prompts.
  struct PeerTileSettings {
    int64_t max_rows = 0;   // of a tile or chunk
    int64_t num_slots = 0;  // of its ring; 0: it has none
    double share = 0.0;     // of the host's experts, that it streams
    int64_t min_rows = 0;   // as of the primary's ring
    int64_t patience_ms = 0;
  };
  // Lets the peer compute its experts' rows of prompts, and of some that it streams (peer_tiles.h);
  // all experts put, before OpenRing.
  std::string OpenPeerTiles(const PeerTileSettings& settings);
  // Lets the peer take rows of attention (peer_attention.h).
  std::string OpenPeerAttention(const PeerAttentionSizes& sizes);
  // Slots that experts of the host's memory, and of the file, pass through in prompts
  // (expert_ring.h); all experts put, before anything is compiled.
  std::string OpenRing(const RingPlan& plan);
  ExpertRing* ring() const { return ring_.get(); }
  // What experts of a chunk of so many rows need while they are computed, if that is borrowed, too.
  uint8_t* ScratchOf(int64_t num_rows) const {
    return num_rows > scratch_above_ ? scratch_ : nullptr;
  }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  // Before a program that may use what is borrowed, and before a window or an audit.
  std::string BorrowSlots();
  std::string GiveSlotsBack();
  // Whether tiles compute all columns of a row at once (expert_ffn_tiles.h).
  bool HasWholeTiles() const { return ring_ != nullptr || PeersTiles() != nullptr; }
  PeerTiles* PeersTiles() const;
  // Times what is compiled from now on to be timed.
  std::string OpenTimeline(int64_t capacity);
  TimelineAt timeline() const { return timeline_ == nullptr ? TimelineAt{} : timeline_->at(); }
  std::vector<std::pair<uint64_t, uint64_t>> TakeTimeline() {
    return timeline_ == nullptr ? std::vector<std::pair<uint64_t, uint64_t>>{} : timeline_->Take();
  }
  // The peer's own, by PeerPhase.
  std::vector<std::pair<uint64_t, uint64_t>> TakePeerTimeline();
  // Whatever a prompt before has left unfinished is to be forgotten.
  void BeginPrompt() { ring_is_stale_ = true; }
  // A tile's program of so many live rows is about to be put into the queue.
  std::string BeginPass(int64_t num_rows);

  // Compares one expert, where the device's table says it lies, with the file's rows. Returns what
  // differs, or an empty string. No step may run.
  std::string AuditExpert(int64_t layer, int64_t expert, const uint8_t* gate, const uint8_t* up,
                          const uint8_t* down);

  int64_t num_layers() const { return num_layers_; }
  int64_t num_experts() const { return num_experts_; }
  const uint64_t* experts(int64_t layer) const { return experts_ + layer * num_experts_; }
  // [layers * experts], raised by kernels for every routed entry.
  uint32_t* usage(int64_t layer) const { return usage_ + layer * num_experts_; }
  std::vector<uint32_t> TakeUsage();
  // Entries since the last time by EntryHome; without doors all of them are kOnPrimary and not
  // counted.
  std::vector<uint32_t> TakeHomes();

 private:
  static std::string Failed(const char* what, int64_t bytes, cudaError_t error);
  void Release();
  std::string SettleRing();
  ExpertTag AwayTag() const { return host_ == nullptr ? ExpertTag::kLocal : ExpertTag::kHost; }
  bool PassesRing(uint64_t word) const;
  void MakePanels(int64_t layer, int64_t expert, int64_t part, uint8_t* slot) const;
  // Of the primary's ring, or the peer's, where the peer takes a share of the host's experts.
  RingSizes SizesOfRing(const RingPlan& plan, double share, bool is_peers) const;
  PanelCopier& Copier();
  void StopHost();
  void StopFiles();
  // Where an arena's `offset` is; null with a reason if an expert of so many bytes ends outside.
  uint8_t* Place(Arena arena, int64_t offset, int64_t bytes, std::string* error) const;

  int64_t num_layers_;
  int64_t num_experts_;
  std::vector<DeviceMatrix> matrices_;
  std::vector<ExpertShape> shapes_;
  uint8_t* matrix_arena_ = nullptr;
  int64_t matrix_bytes_;
  int64_t matrix_used_ = 0;
  uint8_t* expert_arena_ = nullptr;
  int64_t expert_bytes_;
  uint8_t* host_arena_ = nullptr;
  int64_t host_bytes_;
  std::unique_ptr<PanelCopier> copier_;  // between the first Put and PublishExperts
  std::vector<uint64_t> table_;          // what `experts_` holds or will hold
  uint64_t* experts_ = nullptr;
  std::vector<ExpertBytes> raw_;               // the file's rows
  std::vector<std::vector<int32_t>> in_file_;  // by layer
  std::vector<uint32_t> taken_;                // of usage_, by TakeUsage
  Doors doors_;
  // The host's addresses; both stay where they are if a thread of the host is stuck.
  Mailbox* box_ = nullptr;
  float* host_rows_ = nullptr;
  std::unique_ptr<HostWorkers> host_;
  std::unique_ptr<FileStage> files_;
  std::unique_ptr<PeerStore> peer_;
  uint64_t* wanted_ = nullptr;  // null: experts stay where they are
  std::unique_ptr<DeviceSwaps> swaps_;
  LentSlots lent_;
  uint8_t* scratch_ = nullptr;
  int64_t scratch_bytes_ = 0;
  int64_t scratch_above_ = 0;
  std::unique_ptr<ExpertRing> ring_;
  std::unique_ptr<Timeline> timeline_;
  bool ring_is_stale_ = true;  // its list may not be what words say
  uint32_t* usage_ = nullptr;
};

int64_t AddDeviceStore(std::shared_ptr<DeviceStore> store);
// Of a store's peer, if there is a store, it has one, and that takes rows of attention.
PeerAttention* PeersAttention(int64_t slot);
void RemoveDeviceStore(int64_t slot);
std::shared_ptr<DeviceStore> FindDeviceStore(int64_t slot);

}  // namespace strata
