// How unbuffered reads are kept in flight: through io_uring, or by a few threads that block.
//
// An engine belongs to one file and is used by one thread at a time. It owns one page-aligned
// buffer per slot; the kernel writes to a slot's buffer from Start until the answer for that slot
// is handed out. So a buffer is read only after its answer, and an engine that is destroyed with
// reads unanswered keeps their memory (MappedBuffers) alive for as long as something may still
// write to it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace strata {

// A file descriptor that closes with its last holder: a thread stuck in a read holds it too.
class OpenedFile {
 public:
  explicit OpenedFile(int fd) : fd_(fd) {}
  ~OpenedFile();
  OpenedFile(const OpenedFile&) = delete;
  OpenedFile& operator=(const OpenedFile&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Anonymous pages outside the heap, so that nothing else is ever placed where a late read might
// land.
class MappedBuffers {
 public:
  MappedBuffers(int slots, int64_t slot_bytes);  // slot_bytes: whole pages
  ~MappedBuffers();
  MappedBuffers(const MappedBuffers&) = delete;
  MappedBuffers& operator=(const MappedBuffers&) = delete;
  bool valid() const { return bytes_ != nullptr; }
  uint8_t* Slot(int slot) const { return bytes_ + slot * slot_bytes_; }

 private:
  int64_t slot_bytes_;
  int64_t num_bytes_;
  uint8_t* bytes_ = nullptr;
};

struct ReadAnswer {
  int slot;
  int32_t result;  // bytes that arrived, or minus an errno
};

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;

  // What a slot's last answered read brought.
  virtual const uint8_t* Buffer(int slot) const = 0;

  // Starts a read, now or at the next Wait. The slot must not be in flight; offset and length are
  // multiples of what the file asks for, and the length is at most that of a slot.
  virtual void Start(int slot, int64_t offset, int32_t length) = 0;

  // Appends answers. Returns once `at_least` came, or sooner, at the latest after `wait`. Not zero:
  // the errno of an engine that is of no use any more.
  virtual int Wait(int at_least, std::chrono::milliseconds wait,
                   std::vector<ReadAnswer>* answers) = 0;
};

// Null where the kernel refuses: not built in, switched off, forbidden here, or older than
// Linux 5.11
// (*error holds the errno).
std::unique_ptr<ReadEngine> MakeUringEngine(std::shared_ptr<const OpenedFile> file, int depth,
                                            int64_t slot_bytes, int* error);

// Reads with pread on `threads` threads. Null only without memory.
std::unique_ptr<ReadEngine> MakePreadEngine(std::shared_ptr<const OpenedFile> file, int depth,
                                            int64_t slot_bytes, int threads);

}  // namespace strata
