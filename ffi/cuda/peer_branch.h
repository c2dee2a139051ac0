// A branch of the primary's steps that runs on the peer: stream, events and memory of one.
//
// Order. Fork records an event behind what the primary's stream holds and makes the branch's stream
// wait for it; End records another behind the branch's work, and Join makes the primary's stream
// wait for that. Both are events, so that a captured step holds the branch as nodes of its graph.
// One fork is under way at a time: the next one is behind the join of the one before, on the same
// stream of the primary, so the branch's memory needs no order of its own.
//
// Lifetime. Whoever destroys a branch may still have a step in flight: it waits for the peer.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/launch.h"
#include "cuda/timeline.h"

namespace strata {

class PeerBranch {
 public:
  // With `bytes` of memory on `device`; the primary is the current one. Its errors begin with
  // `where`, a literal. Throws std::runtime_error.
  PeerBranch(const char* where, int device, int64_t bytes);
  ~PeerBranch();
  PeerBranch(const PeerBranch&) = delete;
  PeerBranch& operator=(const PeerBranch&) = delete;

  int device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  unsigned char* memory() const { return memory_; }

  // What comes next on the branch's stream waits for `stream`, the primary's.
  std::string Fork(cudaStream_t stream);
  // The branch's work ends here; with the peer as the current device.
  std::string End();
  // Makes the stream wait for the end of the last fork's work.
  std::string Join(cudaStream_t stream);
  // What comes next on the branch's stream is of that phase.
  std::string Mark(PeerPhase phase) const;
  // Times what is compiled from now on.
  void SetTimeline(const TimelineAt& timeline) { timeline_ = timeline; }

  // "<where>: <what>: <the error>".
  std::string Failed(const std::string& what, cudaError_t error) const;
  // The same of `bytes` that are not to be had, with what the current device has.
  std::string Short(const std::string& what, int64_t bytes, cudaError_t error) const;

 private:
  std::string Allocate(int64_t bytes);
  void Release();

  const char* where_;
  int device_;
  cudaStream_t stream_ = nullptr;  // the peer's, as `join_`
  cudaEvent_t fork_ = nullptr;     // the primary's
  cudaEvent_t join_ = nullptr;
  unsigned char* memory_ = nullptr;
  TimelineAt timeline_;
};

}  // namespace strata
