#include "weights/expert_tiers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <shared_mutex>
#include <stdexcept>

namespace strata {
namespace {

constexpr int kTierShift = 56;
constexpr uint64_t kOffsetMask = (uint64_t{1} << kTierShift) - 1;

uint64_t Word(Tier tier, int64_t offset) {
  return static_cast<uint64_t>(tier) << kTierShift | static_cast<uint64_t>(offset);
}

Tier TierOf(uint64_t word) { return static_cast<Tier>(word >> kTierShift); }

bool HasSlot(Tier tier) { return tier == Tier::kPrimary || tier == Tier::kPeer; }

uint8_t* Map(int64_t bytes) {
  if (bytes == 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
}

void Unmap(uint8_t* memory, int64_t bytes) {
  if (memory != nullptr) munmap(memory, bytes);
}

// How long a worker may take to come home when it is no longer needed.
constexpr std::chrono::milliseconds kGrace{1000};

// madvise on the whole pages that hold [bytes, bytes + size).
void Advise(const uint8_t* bytes, int64_t size, int advice) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(bytes) + size;
  madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

struct Registry {
  std::shared_mutex mutex;
  std::vector<std::shared_ptr<ExpertTiers>> slots;
  std::vector<std::shared_ptr<ExpertTiers>> stuck;  // kept for the worker that may come back
};

Registry& TheRegistry() {
  static auto* registry = new Registry();
  return *registry;
}

}  // namespace

ExpertTiers::ExpertTiers(std::shared_ptr<WeightStore> store, const std::array<int64_t, 3>& roles,
                         int64_t num_layers, const TierOptions& options)
    : store_(std::move(store)), num_layers_(num_layers), options_(options) {
  for (int64_t l = 0; l < num_layers; ++l) {
    Layer layer = {
        store_->Get(roles[0], l), store_->Get(roles[1], l), store_->Get(roles[2], l), 0, 0, 0, 0};
    if (layer.gate == nullptr || layer.up == nullptr || layer.down == nullptr) {
      throw std::invalid_argument("expert_tiers: layer " + std::to_string(l) + " has no experts");
    }
    num_experts_ = layer.gate->count;
    layer.gate_bytes = layer.gate->rows * layer.gate->row_bytes();
    layer.up_bytes = layer.up->rows * layer.up->row_bytes();
    layer.down_bytes = layer.down->rows * layer.down->row_bytes();
    layer.size = SlotAligned(layer.gate_bytes + layer.up_bytes + layer.down_bytes);
    layers_.push_back(layer);
    largest_ = std::max(largest_, layer.size);
  }
  const int64_t pairs = num_layers_ * num_experts_;
  homes_.assign(pairs, static_cast<uint8_t>(Tier::kHost));
  words_ = std::make_unique<std::atomic<uint64_t>[]>(pairs);
  counts_ = std::make_unique<std::atomic<uint32_t>[]>(pairs);
  readers_ = std::make_unique<std::atomic<int32_t>[]>(num_layers_);
  usage_.assign(pairs, 0.0f);
  heat_.assign(pairs, 0);
  if (options_.peer_bytes > 0) peer_ = std::make_unique<TierWorker>(options_.peer_threads);
  if (options_.host_threads > 0) host_ = std::make_unique<TierWorker>(options_.host_threads);
  if (options_.primary_bytes > 0 || options_.peer_bytes > 0)
    adapter_ = std::make_unique<TierWorker>(1);
  Allocate();  // last: what throws above has nothing to give back
}

void ExpertTiers::Allocate() {
  if (options_.stream_share > 0.0 && options_.stream_slots < 1) {
    throw std::invalid_argument(
        "expert_tiers: no slots for the streamed share, expected 1 or more");
  }
  const int64_t staging_bytes = (options_.stream_slots + 1) * largest_;
  primary_arena_ = Map(options_.primary_bytes);
  peer_arena_ = Map(options_.peer_bytes);
  staging_ = Map(staging_bytes);
  if ((options_.primary_bytes > 0 && primary_arena_ == nullptr) ||
      (options_.peer_bytes > 0 && peer_arena_ == nullptr) || staging_ == nullptr) {
    Unmap(primary_arena_, options_.primary_bytes);
    Unmap(peer_arena_, options_.peer_bytes);
    Unmap(staging_, staging_bytes);
    throw std::invalid_argument("expert_tiers: no memory for arenas of " +
                                std::to_string(options_.primary_bytes) + " and " +
                                std::to_string(options_.peer_bytes) + " bytes and for " +
                                std::to_string(staging_bytes) + " bytes of copies");
  }
}

ExpertTiers::~ExpertTiers() {
  // Workers first: a job may still read an arena.
  adapter_.reset();
  peer_.reset();
  host_.reset();
  Unmap(primary_arena_, options_.primary_bytes);
  Unmap(peer_arena_, options_.peer_bytes);
  Unmap(staging_, (options_.stream_slots + 1) * largest_);
}

void ExpertTiers::Fail(const std::string& why) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_.empty()) failure_ = why;
  failed_.store(true);
  for (TierWorker* worker : {peer(), host()}) {
    if (worker != nullptr) worker->Cancel();
  }
}

std::string ExpertTiers::failure() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

bool ExpertTiers::Stop() {
  const std::lock_guard<std::mutex> turn(turn_);
  Fail("the tiers are closed");
  bool stopped = true;
  for (TierWorker* worker : {adapter_.get(), peer(), host()}) {
    if (worker == nullptr) continue;
    worker->Cancel();
    stopped = worker->Stop(kGrace, std::max(kGrace, options_.timeout)) && stopped;
  }
  return stopped;
}

std::string ExpertTiers::Place(const uint8_t* tiers, const int64_t* offsets, const uint8_t* homes) {
  std::map<std::pair<uint8_t, int64_t>, int64_t> ends;  // (tier, begin) -> end of each slot
  for (int64_t i = 0; i < num_layers_ * num_experts_; ++i) {
    const std::string name = "expert " + std::to_string(i % num_experts_) + " of layer " +
                             std::to_string(i / num_experts_);
    if (tiers[i] > 3 || HasSlot(static_cast<Tier>(homes[i])) || homes[i] > 3) {
      return name + " has tier " + std::to_string(tiers[i]) + " and home " +
             std::to_string(homes[i]);
    }
    homes_[i] = homes[i];
    const auto tier = static_cast<Tier>(tiers[i]);
    if (!HasSlot(tier)) {
      words_[i] = Word(static_cast<Tier>(homes[i]), 0);
      continue;
    }
    const int64_t end = offsets[i] + layers_[i / num_experts_].size;
    if (offsets[i] < 0 || offsets[i] % kSlotAlign != 0 || end > ArenaBytes(tier)) {
      return name + " has its slot at byte " + std::to_string(offsets[i]) + " of an arena of " +
             std::to_string(ArenaBytes(tier));
    }
    if (!ends.emplace(std::pair{tiers[i], offsets[i]}, end).second)
      return name + " shares its slot";
    words_[i] = Word(tier, offsets[i]);
  }
  for (auto it = ends.begin(); it != ends.end();) {
    const auto slot = it++;
    if (it != ends.end() && it->first.first == slot->first.first &&
        it->first.second < slot->second) {
      return "slots at bytes " + std::to_string(slot->first.second) + " and " +
             std::to_string(it->first.second) + " overlap";
    }
  }
  return "";
}

int64_t ExpertTiers::Fill(int64_t first, int64_t count) {
  int64_t copied = 0;
  for (int64_t i = first; i < std::min(first + count, num_layers_ * num_experts_); ++i) {
    const Residence residence = Find(i / num_experts_, i % num_experts_);
    if (!HasSlot(residence.tier)) continue;
    CopyTo(i / num_experts_, i % num_experts_, Arena(residence.tier) + residence.offset);
    copied += layers_[i / num_experts_].size;
  }
  return copied;
}

int64_t ExpertTiers::Lock(const uint8_t* wanted, int64_t first, int64_t count) const {
  int64_t locked = 0;
  for (int64_t i = first; i < std::min(first + count, num_layers_ * num_experts_); ++i) {
    if (!wanted[i]) continue;
    const Layer& l = layers_[i / num_experts_];
    const ExpertBytes home = Home(i / num_experts_, i % num_experts_);
    if (mlock(home.gate, l.gate_bytes) != 0 || mlock(home.up, l.up_bytes) != 0 ||
        mlock(home.down, l.down_bytes) != 0) {
      return locked;
    }
    locked += l.gate_bytes + l.up_bytes + l.down_bytes;
  }
  return locked;
}

Residence ExpertTiers::Find(int64_t layer, int64_t expert) const {
  const uint64_t word = words_[layer * num_experts_ + expert].load();
  return {TierOf(word), static_cast<int64_t>(word & kOffsetMask)};
}

ExpertBytes ExpertTiers::Home(int64_t layer, int64_t expert) const {
  const Layer& l = layers_[layer];
  return {l.gate->Row(expert, 0), l.up->Row(expert, 0), l.down->Row(expert, 0)};
}

ExpertBytes ExpertTiers::At(const Layer& layer, const uint8_t* base) const {
  const uint8_t* up = base + layer.gate_bytes;
  return {base, up, up + layer.up_bytes};
}

ExpertBytes ExpertTiers::InSlot(int64_t layer, const Residence& residence) const {
  return At(layers_[layer], Arena(residence.tier) + residence.offset);
}

ExpertBytes ExpertTiers::CopyTo(int64_t layer, int64_t expert, uint8_t* to) const {
  const Layer& l = layers_[layer];
  const ExpertBytes home = Home(layer, expert);
  const ExpertBytes there = At(l, to);
  std::memcpy(const_cast<uint8_t*>(there.gate), home.gate, l.gate_bytes);
  std::memcpy(const_cast<uint8_t*>(there.up), home.up, l.up_bytes);
  std::memcpy(const_cast<uint8_t*>(there.down), home.down, l.down_bytes);
  return there;
}

void ExpertTiers::Forget(int64_t layer, int64_t expert) const {
  const Layer& l = layers_[layer];
  const ExpertBytes home = Home(layer, expert);
  Advise(home.gate, l.gate_bytes, MADV_DONTNEED);
  Advise(home.up, l.up_bytes, MADV_DONTNEED);
  Advise(home.down, l.down_bytes, MADV_DONTNEED);
}

void ExpertTiers::ReadAhead(int64_t layer, int64_t num_experts) {
  std::vector<std::pair<uint32_t, int64_t>> likely;
  for (int64_t e = 0; e < num_experts_; ++e) {
    const uint32_t count = counts_[layer * num_experts_ + e].load(std::memory_order_relaxed);
    if (count > 0 && Find(layer, e).tier == Tier::kFile) likely.emplace_back(count, e);
  }
  num_experts = std::min<int64_t>(num_experts, static_cast<int64_t>(likely.size()));
  std::partial_sort(likely.begin(), likely.begin() + num_experts, likely.end(), std::greater<>());
  const Layer& l = layers_[layer];
  for (int64_t i = 0; i < num_experts; ++i) {
    const ExpertBytes home = Home(layer, likely[i].second);
    Advise(home.gate, l.gate_bytes, MADV_WILLNEED);
    Advise(home.up, l.up_bytes, MADV_WILLNEED);
    Advise(home.down, l.down_bytes, MADV_WILLNEED);
  }
}

std::vector<std::string> ExpertTiers::Audit() {
  std::vector<std::string> faults;
  std::map<std::pair<Tier, int64_t>, int64_t> owners;
  for (int64_t i = 0; i < num_layers_ * num_experts_; ++i) {
    const int64_t layer = i / num_experts_;
    const int64_t expert = i % num_experts_;
    const Reader reader(*this, layer);
    const Residence residence = Find(layer, expert);
    if (!HasSlot(residence.tier)) continue;
    const std::string name =
        "expert " + std::to_string(expert) + " of layer " + std::to_string(layer);
    if (!owners.emplace(std::pair{residence.tier, residence.offset}, i).second) {
      faults.push_back(name + " shares its slot with another");
    }
    const Layer& l = layers_[layer];
    const ExpertBytes slot = InSlot(layer, residence);
    const ExpertBytes home = Home(layer, expert);
    if (std::memcmp(slot.gate, home.gate, l.gate_bytes) != 0 ||
        std::memcmp(slot.up, home.up, l.up_bytes) != 0 ||
        std::memcmp(slot.down, home.down, l.down_bytes) != 0) {
      faults.push_back(name + " differs from the file in its slot");
    }
  }
  return faults;
}

std::vector<uint8_t> ExpertTiers::Tiers() const {
  std::vector<uint8_t> tiers(num_layers_ * num_experts_);
  for (size_t i = 0; i < tiers.size(); ++i) {
    tiers[i] = static_cast<uint8_t>(TierOf(words_[i].load()));
  }
  return tiers;
}

void ExpertTiers::SetRecording(bool on) { recording_ = on; }

void ExpertTiers::Record(int64_t layer, const int32_t* ids, int64_t num_rows, int64_t num_active) {
  if (!recording_.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(records_mutex_);
  records_.insert(records_.end(), {static_cast<int32_t>(layer), static_cast<int32_t>(num_rows),
                                   static_cast<int32_t>(num_active)});
  records_.insert(records_.end(), ids, ids + num_rows * num_active);
}

std::vector<int32_t> ExpertTiers::TakeRecords() {
  std::lock_guard<std::mutex> lock(records_mutex_);
  std::vector<int32_t> records;
  records.swap(records_);
  return records;
}

int64_t AddTiers(std::shared_ptr<ExpertTiers> tiers) {
  Registry& registry = TheRegistry();
  std::unique_lock lock(registry.mutex);
  for (size_t i = 0; i < registry.slots.size(); ++i) {
    if (registry.slots[i] == nullptr) {
      registry.slots[i] = std::move(tiers);
      return static_cast<int64_t>(i);
    }
  }
  registry.slots.push_back(std::move(tiers));
  return static_cast<int64_t>(registry.slots.size()) - 1;
}

void RemoveTiers(int64_t slot) {
  Registry& registry = TheRegistry();
  std::shared_ptr<ExpertTiers> dropped;  // destroyed outside the lock: it joins threads
  std::unique_lock lock(registry.mutex);
  if (slot >= 0 && slot < static_cast<int64_t>(registry.slots.size())) {
    dropped.swap(registry.slots[slot]);
  }
  lock.unlock();
  if (dropped == nullptr || dropped->Stop()) return;
  lock.lock();
  registry.stuck.push_back(std::move(dropped));
}

std::shared_ptr<ExpertTiers> FindTiers(int64_t slot) {
  Registry& registry = TheRegistry();
  std::shared_lock lock(registry.mutex);
  if (slot < 0 || slot >= static_cast<int64_t>(registry.slots.size())) return nullptr;
  return registry.slots[slot];
}

}  // namespace strata
