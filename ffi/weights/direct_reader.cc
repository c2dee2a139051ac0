#include "weights/direct_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace strata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTries = 4;                         // of one read, whatever the reason
constexpr std::chrono::milliseconds kSlice(100);  // how long Cancel may go unnoticed
constexpr std::chrono::seconds kLeave(1);         // for what is in flight when Cancel is noticed

bool WorthRepeating(int32_t result) {
  return result == -EINTR || result == -EAGAIN || result == -ECANCELED || result > 0;
}

std::string Seconds(std::chrono::milliseconds time) {
  return time.count() % 1000 == 0 ? std::to_string(time.count() / 1000) + " s"
                                  : std::to_string(time.count()) + " ms";
}

std::string Reason(int32_t result, const PageRead& read) {
  if (result < 0) return std::strerror(-result);
  return "the file ends after " + std::to_string(result) + " of " + std::to_string(read.needed) +
         " bytes";
}

}  // namespace

struct DirectReader::Job {
  std::span<const PageRead> reads;
  const Arrived& arrived;
  size_t next = 0;  // first read that was not started
  std::optional<ReadFault> fault;
};

DirectReader::DirectReader(EngineFactory make_engine, int depth, std::chrono::milliseconds timeout)
    : make_engine_(std::move(make_engine)), timeout_(timeout), slots_(depth) {}

void DirectReader::StartMore(Job* job) {
  for (; !free_.empty() && job->next < job->reads.size() && !job->fault; ++job->next) {
    const int slot = free_.back();
    free_.pop_back();
    const PageRead& read = job->reads[job->next];
    slots_[slot] = {static_cast<int64_t>(job->next), 1};
    engine_->Start(slot, read.offset, read.length);
  }
}

void DirectReader::Settle(Job* job, const ReadAnswer& answer) {
  Slot& slot = slots_[answer.slot];
  const PageRead& read = job->reads[slot.read];
  if (answer.result >= read.needed) {
    job->arrived(slot.read, engine_->Buffer(answer.slot));
  } else if (WorthRepeating(answer.result) && slot.tries < kTries && !job->fault) {
    ++slot.tries;
    engine_->Start(answer.slot, read.offset, read.length);
    return;
  } else if (!job->fault || slot.read < job->fault->read) {
    job->fault = ReadFault{slot.read, std::max(0, -answer.result), Reason(answer.result, read)};
  }
  slot.read = -1;
  free_.push_back(answer.slot);
}

// The first read of the job that was not answered; one must be in flight.
int64_t DirectReader::FirstOpen() const {
  int64_t first = INT64_MAX;
  for (const Slot& slot : slots_) {
    if (slot.read >= 0) first = std::min(first, slot.read);
  }
  return first;
}

void DirectReader::Reset() {
  engine_ = make_engine_();
  free_.clear();
  for (size_t i = slots_.size(); i > 0; --i) free_.push_back(static_cast<int>(i) - 1);
  std::fill(slots_.begin(), slots_.end(), Slot());
}

std::optional<ReadFault> DirectReader::Read(std::span<const PageRead> reads,
                                            const Arrived& arrived) {
  if (engine_ == nullptr) Reset();
  if (engine_ == nullptr) return ReadFault{0, ENOMEM, std::strerror(ENOMEM)};
  Job job{reads, arrived, 0, std::nullopt};
  std::vector<ReadAnswer> answers;
  auto deadline = Clock::now() + timeout_;
  while (true) {
    StartMore(&job);
    const size_t in_flight = slots_.size() - free_.size();
    if (in_flight == 0) return job.fault;
    if (cancelled_.load() && !job.fault) {
      job.fault = ReadFault{FirstOpen(), ECANCELED, "the table was closed"};
      deadline = std::min(deadline, Clock::now() + kLeave);
    }
    // While there is more to start, a part of the answers is enough to go on.
    const size_t enough = job.next < reads.size() && !job.fault ? (in_flight + 7) / 8 : in_flight;
    answers.clear();
    const int error = engine_->Wait(static_cast<int>(enough), std::min(kSlice, timeout_), &answers);
    const auto now = Clock::now();
    if (!answers.empty() && !cancelled_.load()) deadline = now + timeout_;
    for (const ReadAnswer& answer : answers) Settle(&job, answer);
    if (error != 0 || now >= deadline) {
      if (free_.size() == slots_.size() && job.next == reads.size()) return job.fault;
      const int64_t first = free_.size() < slots_.size() ? FirstOpen() : job.next;
      engine_ = nullptr;  // its unanswered reads keep their buffers; see read_engine.h
      if (job.fault) return job.fault;
      if (error != 0) return ReadFault{first, error, std::strerror(error)};
      return ReadFault{first, ETIMEDOUT, "no answer within " + Seconds(timeout_)};
    }
  }
}

}  // namespace strata
