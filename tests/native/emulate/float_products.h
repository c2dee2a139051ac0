// One thread's share of the products of cuda/group_mma_floats.cuh that it has begun.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulate/sync.h"

namespace emulate {

class FloatProducts {
 public:
  void Begin(float* d, int num_columns, uint64_t rows, uint64_t columns, const Place& place);
  void Begin(float* d, int num_columns, const uint32_t (&a)[4], uint64_t columns,
             const Place& place);
  // Closes what was begun.
  void End() { ends_.push_back(products_.size()); }
  // Makes what was closed but the `pending` newest.
  void Wait(int pending);
  bool empty() const { return products_.empty(); }
  void Clear();

 private:
  struct Product {
    float* d;
    int num_columns;
    uint64_t rows, columns;
    Place place;
    const uint32_t* own =
        nullptr;  // the thread's registers of its rows, if those are not in memory
    uint32_t was[4] = {};
    uint32_t shown[2][8] = {};
  };
  // Sums of which products are on their way: nobody may look at d.
  struct Sums {
    float* d;
    int pending;
    std::vector<float> values;
  };

  Sums& Of(float* d);
  void Push(const Product& product);
  void Make(const Product& product);

  std::vector<Product> products_;  // in order
  std::vector<size_t> ends_;       // how many of them each closed group ends with
  std::vector<Sums> sums_;
};

}  // namespace emulate
