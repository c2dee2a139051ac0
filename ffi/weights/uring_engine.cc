// Reads through io_uring with bare system calls: two rings shared with the kernel.
//
// Shared words, and who may write them (io_uring_setup(2), "the submission and completion rings"):
//   sq tail   ours. Stored with release after the entries below it are filled in.
//   sq head   the kernel's; it moves inside io_uring_enter only (no polling thread is asked for).
//   cq tail   the kernel's. Loaded with acquire before the entries below it, and the buffers that
//   they
//             answer for, are read.
//   cq head   ours. Stored with release after the entries below it were copied out.
// There are as many entries as slots and a slot is in flight once, so neither ring can overflow.

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "weights/read_engine.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

namespace strata {

#if defined(IORING_ENTER_EXT_ARG) && defined(__NR_io_uring_setup)

namespace {

class UringEngine final : public ReadEngine {
 public:
  UringEngine(std::shared_ptr<const OpenedFile> file, int depth, int64_t slot_bytes)
      : file_(std::move(file)), buffers_(std::make_unique<MappedBuffers>(depth, slot_bytes)) {}

  ~UringEngine() override {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (ring_ != nullptr) munmap(ring_, ring_bytes_);
    if (ring_fd_ >= 0) close(ring_fd_);
    // The kernel cancels what is left in its own time and may still write: these pages are given
    // up.
    if (in_flight_ > 0) static_cast<void>(buffers_.release());
  }

  // Returns an errno.
  int Open(int depth) {
    if (!buffers_->valid()) return ENOMEM;
    io_uring_params params = {};
    ring_fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (ring_fd_ < 0) return errno;
    constexpr unsigned kNeeded = IORING_FEAT_EXT_ARG | IORING_FEAT_SINGLE_MMAP;
    if ((params.features & kNeeded) != kNeeded) return ENOSYS;
    ring_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                   params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    ring_ = static_cast<uint8_t*>(Map(ring_bytes_, IORING_OFF_SQ_RING));
    entries_ = static_cast<io_uring_sqe*>(Map(entries_bytes_, IORING_OFF_SQES));
    if (ring_ == nullptr || entries_ == nullptr) return ENOMEM;
    sq_tail_ = Word(params.sq_off.tail);
    sq_head_ = Word(params.sq_off.head);
    sq_mask_ = *Word(params.sq_off.ring_mask);
    sq_array_ = Word(params.sq_off.array);
    cq_head_ = Word(params.cq_off.head);
    cq_tail_ = Word(params.cq_off.tail);
    cq_mask_ = *Word(params.cq_off.ring_mask);
    cq_entries_ = reinterpret_cast<io_uring_cqe*>(ring_ + params.cq_off.cqes);
    return 0;
  }

  const uint8_t* Buffer(int slot) const override { return buffers_->Slot(slot); }

  void Start(int slot, int64_t offset, int32_t length) override {
    const unsigned tail = *sq_tail_;
    io_uring_sqe& entry = entries_[tail & sq_mask_];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = IORING_OP_READ;
    entry.fd = file_->fd();
    entry.off = static_cast<uint64_t>(offset);
    entry.addr = reinterpret_cast<uint64_t>(buffers_->Slot(slot));
    entry.len = static_cast<uint32_t>(length);
    entry.user_data = static_cast<uint64_t>(slot);
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++in_flight_;
  }

  int Wait(int at_least, std::chrono::milliseconds wait,
           std::vector<ReadAnswer>* answers) override {
    const unsigned unsent = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    const unsigned ready = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE) - *cq_head_;
    int error = 0;
    if (unsent > 0 || ready < static_cast<unsigned>(at_least))
      error = Enter(unsent, at_least, wait);
    Collect(answers);
    return error;
  }

 private:
  void* Map(size_t num_bytes, off_t place) const {
    void* bytes = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                       ring_fd_, place);
    return bytes == MAP_FAILED ? nullptr : bytes;
  }

  unsigned* Word(unsigned place) const { return reinterpret_cast<unsigned*>(ring_ + place); }

  int Enter(unsigned unsent, int at_least, std::chrono::milliseconds wait) {
    __kernel_timespec time = {};
    time.tv_sec = wait.count() / 1000;
    time.tv_nsec = wait.count() % 1000 * 1000000;
    io_uring_getevents_arg arg = {};
    arg.ts = reinterpret_cast<uint64_t>(&time);
    const long entered = syscall(__NR_io_uring_enter, ring_fd_, unsent, at_least,
                                 IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &arg, sizeof(arg));
    if (entered >= 0) return 0;
    // Time is up, a signal came, or the kernel wants answers collected first: the caller comes
    // back.
    return errno == ETIME || errno == EINTR || errno == EAGAIN || errno == EBUSY ? 0 : errno;
  }

  void Collect(std::vector<ReadAnswer>* answers) {
    unsigned head = *cq_head_;
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& entry = cq_entries_[head & cq_mask_];
      answers->push_back({static_cast<int>(entry.user_data), entry.res});
      --in_flight_;
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
  }

  std::shared_ptr<const OpenedFile> file_;
  std::unique_ptr<MappedBuffers> buffers_;
  int64_t in_flight_ = 0;
  int ring_fd_ = -1;
  size_t ring_bytes_ = 0;
  size_t entries_bytes_ = 0;
  uint8_t* ring_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* cq_entries_ = nullptr;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_head_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned* cq_head_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned cq_mask_ = 0;
};

}  // namespace

std::unique_ptr<ReadEngine> MakeUringEngine(std::shared_ptr<const OpenedFile> file, int depth,
                                            int64_t slot_bytes, int* error) {
  auto engine = std::make_unique<UringEngine>(std::move(file), depth, slot_bytes);
  *error = engine->Open(depth);
  if (*error != 0) return nullptr;
  return engine;
}

#else

std::unique_ptr<ReadEngine> MakeUringEngine(std::shared_ptr<const OpenedFile>, int, int64_t,
                                            int* error) {
  *error = ENOSYS;
  return nullptr;
}

#endif

}  // namespace strata
