// Grain sizes of parallel loops.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"

namespace polycast_cpu {

using polycast::for_each_part;

// Return the least number of parts for a thread, given the cost of one in bytes of a weight or elements of activations.
constexpr int64_t grain(int64_t cost) {
  return std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(1, cost));
}

}  // namespace polycast_cpu
