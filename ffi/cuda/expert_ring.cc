#include "cuda/expert_ring.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cuda/current_device.h"

namespace strata {
namespace {

// Copies between two announcements: their 8 bytes cost the link some microseconds.
constexpr uint64_t kBatch = 8;
// Numbers on their way; none is written again before the stream was once empty in between.
constexpr uint64_t kNumbers = 1 << 15;
// Between two looks at what may be free or done: a copy takes some 50.
constexpr std::chrono::microseconds kLook{20};

std::string Failed(const char* what, int64_t bytes, cudaError_t error) {
  return std::string("expert_ring: ") + what + " of " + std::to_string(bytes >> 20) +
         " MiB failed (" + cudaGetErrorString(error) + ")";
}

// Of a layer.
int64_t MaskWords(const RingSizes& sizes) { return (sizes.num_experts + 31) / 32; }

}  // namespace

int64_t RingGroups(int64_t num_experts, int64_t most_listed, int64_t num_slots) {
  int64_t groups = 1;
  const auto most = [&] { return std::min((num_experts + groups - 1) / groups, most_listed); };
  while (groups < num_experts && 2 * most() > num_slots) groups *= 2;
  return groups;
}

ExpertRing::ExpertRing(const RingSizes& sizes, MakePanels make)
    : sizes_(sizes), groups_(RingGroups(sizes.num_experts, sizes.most_listed, sizes.num_slots)) {
  if (sizes.num_slots < 2) throw std::runtime_error("expert_ring: at least 2 slots expected");
  cudaGetDevice(&device_);
  const auto take = [this](const char* what, int64_t bytes, cudaError_t error) {
    if (error == cudaSuccess) return;
    Release();
    throw std::runtime_error(Failed(what, bytes, error));
  };
  const int64_t slot_bytes = sizes.num_slots * sizes.slot_bytes;
  const int64_t place_bytes = sizes.num_layers * sizes.num_experts * 4;
  const int64_t bound_bytes = (sizes.num_layers * groups_ + 1) * 4;
  if (sizes.memory == nullptr) {
    take("memory for slots", slot_bytes, cudaMalloc(&owned_slots_, slot_bytes));
  }
  slots_ = sizes.memory == nullptr ? owned_slots_ : sizes.memory;
  take("a table", place_bytes, cudaMalloc(&places_, place_bytes));
  take("a table", bound_bytes, cudaMalloc(&bounds_, bound_bytes));
  take("a state", sizeof(RingState), cudaMalloc(&state_, sizeof(RingState)));
  take("a state", sizeof(RingState), cudaMemset(state_, 0, sizeof(RingState)));
  take("page-locked memory", kNumbers * 8,
       cudaHostAlloc(reinterpret_cast<void**>(&numbers_), kNumbers * 8, cudaHostAllocDefault));
  const auto word_bytes =
      static_cast<int64_t>(sizeof(RingWords)) + sizes.num_layers * MaskWords(sizes) * 4;
  take("page-locked memory", word_bytes,
       cudaHostAlloc(reinterpret_cast<void**>(&words_), word_bytes, cudaHostAllocMapped));
  std::memset(static_cast<void*>(words_), 0, word_bytes);
  take("page-locked memory", word_bytes, cudaHostGetDevicePointer(&words_on_device_, words_, 0));
  take("a stream", 0, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  for (cudaEvent_t& event : batches_) {
    take("an event", 0, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  std::string error = sizes.stager_threads > 0 ? OpenStager(std::move(make)) : "";
  if (error.empty() && sizes.far_device >= 0) error = OpenFar();
  if (error.empty()) error = SetList({});
  if (!error.empty()) {
    Release();
    throw std::runtime_error(error);
  }
  issuer_ = std::thread([this] { Loop(); });
}

ExpertRing::~ExpertRing() { Release(); }

std::string ExpertRing::OpenStager(MakePanels make) {
  ExpertStager::Work work;
  work.is_wanted = [this](uint64_t n) {
    return list_[n % list_.size()].from == nullptr && !IsUnrouted(n) && n >= Freed();
  };
  work.make = [this, make = std::move(make)](uint64_t n, int64_t part, uint8_t* to) {
    const Entry& entry = list_[n % list_.size()];
    make(entry.layer, entry.expert, part, to);
  };
  try {
    stager_ = std::make_unique<ExpertStager>(sizes_.slot_bytes, sizes_.stager_threads,
                                             std::move(work), &words_->beat);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string ExpertRing::OpenFar() {
  try {
    far_ = std::make_unique<StagedCopies>(sizes_.far_device, sizes_.slot_bytes);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

void ExpertRing::Release() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    abandon_ = true;
  }
  changed_.notify_all();
  if (stager_ != nullptr) stager_->Halt();  // the issuer may wait for it
  if (issuer_.joinable()) issuer_.join();
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  stager_ = nullptr;
  for (const cudaEvent_t event : batches_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  far_ = nullptr;
  for (void* memory : {static_cast<void*>(owned_slots_), static_cast<void*>(state_),
                       static_cast<void*>(places_), static_cast<void*>(bounds_)}) {
    cudaFree(memory);
  }
  cudaFreeHost(words_);
  cudaFreeHost(numbers_);
}

RingAt ExpertRing::At(int64_t layer) const {
  RingAt at;
  at.state = state_;
  at.places = places_ + layer * sizes_.num_experts;
  at.bounds = bounds_ + layer * groups_;
  at.slots = slots_;
  at.words = words_on_device_;
  at.slot_bytes = sizes_.slot_bytes;
  at.num_slots = static_cast<int32_t>(sizes_.num_slots);
  at.groups = static_cast<int32_t>(groups_);
  at.min_rows = static_cast<int32_t>(sizes_.min_rows);
  at.patience_ms = static_cast<int32_t>(sizes_.patience_ms);
  at.first_mask = static_cast<int32_t>(layer * MaskWords(sizes_));
  at.has_stager = stager_ != nullptr;
  at.is_last = layer + 1 == sizes_.num_layers;
  at.is_far = far_ != nullptr;
  return at;
}

std::string ExpertRing::SetList(std::vector<Entry> list) {
  std::unique_lock<std::mutex> lock(mutex_);
  abandon_ = true;
  if (stager_ != nullptr) stager_->Halt();
  changed_.wait(lock, [this] { return !busy_; });
  cudaError_t error = cudaStreamSynchronize(stream_);
  counts_.given_up += Late();  // which is forgotten below
  const int64_t per_group = (sizes_.num_experts + groups_ - 1) / groups_;
  std::vector<uint32_t> places(sizes_.num_layers * sizes_.num_experts, kNotListed);
  std::vector<uint32_t> bounds(sizes_.num_layers * groups_ + 1);
  ends_group_.assign(list.size(), false);
  for (size_t i = 0; i < list.size(); ++i) {
    const int64_t group = list[i].layer * groups_ + list[i].expert / per_group;
    places[list[i].layer * sizes_.num_experts + list[i].expert] = static_cast<uint32_t>(i);
    bounds[group + 1] = static_cast<uint32_t>(i + 1);
    if (i + 1 == list.size() ||
        list[i + 1].layer * groups_ + list[i + 1].expert / per_group != group) {
      ends_group_[i] = true;
    }
  }
  for (size_t g = 1; g < bounds.size(); ++g) bounds[g] = std::max(bounds[g], bounds[g - 1]);
  const auto put = [&](void* to, const std::vector<uint32_t>& from) {
    if (error == cudaSuccess) {
      error = cudaMemcpy(to, from.data(), from.size() * 4, cudaMemcpyHostToDevice);
    }
  };
  put(places_, places);
  put(bounds_, bounds);
  if (error == cudaSuccess) error = cudaMemset(state_, 0, sizeof(RingState));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  __atomic_store_n(&words_->told, uint64_t{0}, __ATOMIC_RELEASE);
  __atomic_store_n(&words_->freed, uint64_t{0}, __ATOMIC_RELEASE);
  __atomic_store_n(&words_->missed, uint64_t{0}, __ATOMIC_RELEASE);
  list_ = std::move(list);
  issued_ = announced_ = num_batches_ = 0;
  target_ = 0;
  abandon_ = false;
  if (stager_ != nullptr) stager_->Resume();
  return error == cudaSuccess ? "" : std::string("expert_ring: ") + cudaGetErrorString(error);
}

std::string ExpertRing::BeginPass() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_.empty()) return error_;
  if (list_.empty()) return "";
  ++counts_.passes;
  target_ += list_.size();
  if (stager_ != nullptr) stager_->Raise(target_);
  changed_.notify_all();
  return "";
}

ExpertRing::Counts ExpertRing::counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Counts now = counts_;
  now.given_up += Late();
  return now;
}

int64_t ExpertRing::Late() const {
  uint64_t late = 0;
  // A device that does not answer says so to whoever waits for results.
  static_cast<void>(cudaMemcpy(&late, &state_->late, sizeof(late), cudaMemcpyDeviceToHost));
  return static_cast<int64_t>(late);
}

bool ExpertRing::TakeMissed() {
  return __atomic_exchange_n(&words_->missed, uint64_t{0}, __ATOMIC_ACQ_REL) != 0;
}

void ExpertRing::Loop() {
  const CurrentDevice current(device_);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || (issued_ < target_ && !abandon_); });
    if (stop_) return;
    busy_ = true;
    lock.unlock();
    Issue();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void ExpertRing::Issue() {
  while (issued_ < target_ && !abandon_) {
    if (!AwaitSlot() || !AwaitEngine()) return;
    const size_t place = issued_ % list_.size();
    Copy(list_[place]);
    ++issued_;
    if (issued_ - announced_ == kBatch || ends_group_[place]) Announce();
  }
}

// False: the pass is not to go on.
bool ExpertRing::AwaitSlot() {
  const auto slots = static_cast<uint64_t>(sizes_.num_slots);
  if (issued_ < Freed() + slots) return true;
  if (announced_ < issued_) Announce();
  const auto began = std::chrono::steady_clock::now();
  while (issued_ >= Freed() + slots) {
    if (abandon_) return false;
    std::this_thread::sleep_for(kLook);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_.waited_us += std::chrono::duration_cast<std::chrono::microseconds>(
                           std::chrono::steady_clock::now() - began)
                           .count();
  return true;
}

// Until the copies in the engine's queue are few: what is not there yet may turn out to be
// unrouted.
bool ExpertRing::AwaitEngine() {
  if (announced_ < issued_ || num_batches_ < batches_.size()) return true;
  const cudaEvent_t oldest = batches_[num_batches_ % batches_.size()];
  cudaError_t status = cudaEventQuery(oldest);
  while (status == cudaErrorNotReady) {
    if (abandon_) return false;
    std::this_thread::sleep_for(kLook);
    status = cudaEventQuery(oldest);
  }
  cudaGetLastError();  // not to be ready is no error, and must not look like one
  Fail("a copy", status);
  return status == cudaSuccess;
}

// Whether it is known that no row has chosen entry n; of meaning only if n is not freed
// afterwards.
bool ExpertRing::IsUnrouted(uint64_t n) const {
  if (__atomic_load_n(&words_->told, __ATOMIC_ACQUIRE) <= n) return false;
  const Entry& entry = list_[n % list_.size()];
  const uint32_t* masks = words_->masks + entry.layer * MaskWords(sizes_);
  const uint32_t mask = __atomic_load_n(masks + entry.expert / 32, __ATOMIC_ACQUIRE);
  return (mask >> entry.expert % 32 & 1) == 0;
}

void ExpertRing::Copy(const Entry& entry) {
  const bool is_unrouted = IsUnrouted(issued_);
  const uint8_t* from = nullptr;
  if (issued_ >= Freed() && !is_unrouted) {
    // What the stager does not make has been freed, or is unrouted, meanwhile.
    from = entry.from != nullptr ? entry.from : stager_->Await(issued_);
  }
  if (abandon_) return;
  if (from != nullptr) {
    uint8_t* slot = slots_ + issued_ % sizes_.num_slots * sizes_.slot_bytes;
    Fail("a copy", entry.is_far
                       ? far_->Copy(slot, from, entry.bytes, stream_)
                       : cudaMemcpyAsync(slot, from, entry.bytes, cudaMemcpyDefault, stream_));
    if (entry.from == nullptr) Fail("a copy", stager_->Taken(stream_));
  }
  const bool is_freed = issued_ < Freed();
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(from != nullptr ? counts_.copied : is_freed ? counts_.left_out : counts_.unrouted);
  if (from != nullptr) counts_.bytes += entry.bytes;
}

void ExpertRing::Announce() {
  if (issued_ / (kNumbers / 2) != announced_ / (kNumbers / 2)) {
    Fail("a copy", cudaStreamSynchronize(stream_));
  }
  uint64_t* number = numbers_ + issued_ % kNumbers;
  *number = announced_ = issued_;
  Fail("a copy", cudaMemcpyAsync(&state_->arrived, number, 8, cudaMemcpyHostToDevice, stream_));
  Fail("a copy", cudaEventRecord(batches_[num_batches_++ % batches_.size()], stream_));
}

void ExpertRing::Fail(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = std::string("expert_ring: ") + what + " failed: " + cudaGetErrorString(error);
  abandon_ = true;
}

}  // namespace strata
