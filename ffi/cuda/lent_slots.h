// Slots of the expert cache that a prompt borrows: the last ones of the primary's arena.
//
// Where a device's memory is short, the slots of a ring (expert_ring.h) and what experts of large
// chunks need while they are computed lie where experts lie between prompts. Such an expert has a
// second copy in page-locked memory, its home, and stays where it is otherwise: it takes no part in
// swaps. While its slot is lent its word says that it lies at home, so that a prompt streams it as
// all others of the host's memory. Before the next window its slot is filled again.
//
// Slots are lent and filled with no program under way, by the thread that puts programs into the
// device's queue; the ring is empty when they are filled.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/expert_word.h"
#include "cuda/launch.h"

namespace strata {

class LentSlots {
 public:
  // `table`: words of all experts, the host's copy, which stays where it is; `index`: of an expert
  // that has been put; `home`: room for a second copy, which the caller fills.
  void Add(std::vector<uint64_t>* table, int64_t index, uint8_t* home, int64_t bytes);

  bool empty() const { return experts_.empty(); }
  bool is_lent() const { return is_lent_; }
  // Whether an expert stays where it is, by word.
  std::vector<bool> Fixed(size_t num_words) const;

  // Writes words, which are to be published then. `away`: the tag of experts off the device.
  void Lend(ExpertTag away);
  // Fills the slots and writes words as they were; no kernel and no copy may be under way. After an
  // error they are lent as before.
  std::string GiveBack();

 private:
  struct Expert {
    int64_t index;
    uint64_t word;  // as it is between prompts
    uint8_t* home;
    int64_t bytes;
  };

  std::vector<uint64_t>* table_ = nullptr;
  std::vector<Expert> experts_;
  bool is_lent_ = false;
};

}  // namespace strata
