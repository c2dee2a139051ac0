#include "cuda/lent_slots.h"

namespace strata {

void LentSlots::Add(std::vector<uint64_t>* table, int64_t index, uint8_t* home, int64_t bytes) {
  table_ = table;
  experts_.push_back({index, (*table)[index], home, bytes});
}

std::vector<bool> LentSlots::Fixed(size_t num_words) const {
  std::vector<bool> fixed(num_words);
  for (const Expert& expert : experts_) fixed[expert.index] = true;
  return fixed;
}

void LentSlots::Lend(ExpertTag away) {
  for (const Expert& expert : experts_) {
    (*table_)[expert.index] = ExpertWord(expert.home, away, true);
  }
  is_lent_ = !experts_.empty();
}

std::string LentSlots::GiveBack() {
  cudaError_t error = cudaSuccess;
  for (const Expert& expert : experts_) {
    if (error != cudaSuccess) break;
    auto* slot = reinterpret_cast<uint8_t*>(expert.word & ~kTagBits);
    error = cudaMemcpyAsync(slot, expert.home, expert.bytes, cudaMemcpyHostToDevice, nullptr);
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) return std::string("lent_slots: ") + cudaGetErrorString(error);
  for (const Expert& expert : experts_) (*table_)[expert.index] = expert.word;
  is_lent_ = false;
  return "";
}

}  // namespace strata
