// A serial substitute for the loops on torch's threads: programs with it need no torch.
#pragma once

#include <cstdint>

namespace polycast {

template <typename Body>
void for_each_part(int64_t count, int64_t, const Body& body) {
  body(int64_t{0}, count);
}

}  // namespace polycast
