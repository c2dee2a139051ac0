#include "emulate/messages.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "emulate/block.h"
#include "emulate/cuda.h"

namespace emulate {
namespace {

std::string Triple(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

}  // namespace

bool SamePlace(const Place& a, const Place& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

std::string Text(const Place& place) {
  return std::string(place.file) + ":" + std::to_string(place.line) + " in " + place.function;
}

std::string Block::Here(const Place& place) const {
  return "emulate: " + Text(place) + ", block " + Triple(blockIdx) + ", thread " +
         Triple(threads_[current_].index);
}

std::string Block::Stuck() const {
  struct Crowd {
    const Thread* first;
    int count;
  };
  std::vector<Crowd> crowds;
  for (const Thread& thread : threads_) {
    if (!thread.waits) continue;
    const auto same = [&](const Crowd& crowd) {
      return SamePlace(*crowd.first->place, *thread.place) && crowd.first->mask == thread.mask;
    };
    const auto found = std::find_if(crowds.begin(), crowds.end(), same);
    if (found != crowds.end()) {
      ++found->count;
    } else {
      crowds.push_back({&thread, 1});
    }
  }
  std::string text = "emulate: deadlock in block " + Triple(blockIdx) + " of " +
                     std::to_string(threads_.size()) + " threads:";
  for (const Crowd& crowd : crowds) {
    char mask[40] = "the block";
    if (crowd.first->mask != 0) {
      std::snprintf(mask, sizeof(mask), "lanes 0x%08x", crowd.first->mask);
    }
    text += " " + std::to_string(crowd.count) + " wait for " + mask + " at " +
            Text(*crowd.first->place) + ", the first is " + Triple(crowd.first->index) + ";";
  }
  return text + " " + std::to_string(num_ended_) + " have ended";
}

}  // namespace emulate
