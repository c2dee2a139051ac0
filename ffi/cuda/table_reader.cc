#include "cuda/table_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/launch.h"

namespace strata {
namespace {

using std::chrono::milliseconds;

// How long a lost thread is given to come home.
constexpr milliseconds kGrace{1000};

}  // namespace

std::string TableReader::Open(std::shared_ptr<NgramTable> table, int64_t most_rows,
                              int64_t timeout_ms, std::unique_ptr<TableReader>* reader) {
  if (table == nullptr || most_rows < 1 || most_rows > INT32_MAX || timeout_ms < 1) {
    return "a reader of " + std::to_string(most_rows) + " rows and " + std::to_string(timeout_ms) +
           " ms, expected an open table and at least 1";
  }
  std::unique_ptr<TableReader> made(new TableReader(std::move(table)));
  std::string wrong = made->Allocate(most_rows);
  if (!wrong.empty()) return wrong;
  TableReader* self = made.get();
  self->SetTimeout(timeout_ms);
  self->table_->BeatAt(&self->box_->beat);
  self->poller_ =
      std::make_unique<Poller>(self->box_, [self](uint64_t epoch) { self->Answer(epoch); });
  *reader = std::move(made);
  return "";
}

std::string TableReader::Allocate(int64_t most_rows) {
  at_.sizes = SizesOfTableMailbox(most_rows, table_->row_bytes());
  const auto bytes = static_cast<size_t>(BytesOfTableMailbox(at_.sizes));
  void* host = nullptr;
  void* seen = nullptr;
  cudaError_t error = cudaHostAlloc(&host, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaSuccess) {
    std::memset(host, 0, bytes);
    box_ = static_cast<TableMailbox*>(host);
    error = cudaHostGetDevicePointer(&seen, host, 0);
  }
  if (error == cudaSuccess) error = cudaMalloc(&at_.state, sizeof(TableMailboxState));
  if (error == cudaSuccess) error = cudaMemset(at_.state, 0, sizeof(TableMailboxState));
  if (error != cudaSuccess) {
    cudaGetLastError();  // what was answered is no error of a later call
    return std::to_string(bytes) + " bytes of page-locked memory for rows are not to be had (" +
           cudaGetErrorString(error) + ")";
  }
  at_.box = static_cast<TableMailbox*>(seen);
  at_.answers = at_.box->letters + 2 * at_.sizes.letter_bytes;
  return "";
}

bool TableReader::Stop() {
  cudaDeviceSynchronize();  // a step may still be in flight
  return poller_ == nullptr || poller_->Stop(kGrace);
}

TableReader::~TableReader() {
  poller_ = nullptr;
  table_->BeatAt(nullptr);
  table_ = nullptr;  // with its own threads, which beat in the box
  cudaFree(at_.state);
  cudaFreeHost(box_);
}

void TableReader::Answer(uint64_t epoch) {
  const int64_t half = static_cast<int64_t>(epoch % 2);
  const auto* letter =
      reinterpret_cast<const TableLetter*>(box_->letters + half * at_.sizes.letter_bytes);
  uint8_t* answer = box_->letters + 2 * at_.sizes.letter_bytes + half * at_.sizes.answer_bytes;
  const std::string wrong = table_->ReadRows(letter->rows, letter->count, answer);
  if (wrong.empty()) return;
  box_->refused = epoch;  // seen before `done`, which follows with release
  const std::lock_guard<std::mutex> lock(mutex_);
  if (problem_.empty()) problem_ = wrong;
}

std::string TableReader::Problem() const {
  if (__atomic_load_n(&box_->aborted, __ATOMIC_ACQUIRE) != 0) {
    return "the thread that reads rows gave no sign of life for " +
           std::to_string(box_->timeout_ms) + " ms";
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return problem_;
}

bool TableReader::Recover() {
  if (Problem().empty()) return true;
  cudaDeviceSynchronize();
  if (!poller_->Recover(kGrace)) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  problem_.clear();
  return cudaMemset(&at_.state->failed, 0, sizeof(uint32_t)) == cudaSuccess;
}

void TableReader::SetTimeout(int64_t timeout_ms) {
  const auto limit = static_cast<uint32_t>(std::clamp<int64_t>(timeout_ms, 1, UINT32_MAX));
  __atomic_store_n(&box_->timeout_ms, limit, __ATOMIC_RELEASE);
}

}  // namespace strata
