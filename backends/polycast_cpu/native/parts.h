// What is worth a thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"

namespace polycast_cpu {

using polycast::for_each_part;

// How many parts of a cost, in bytes of a weight or elements of activations, are worth a thread.
constexpr int64_t grain(int64_t cost) {
  return std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(1, cost));
}

}  // namespace polycast_cpu
