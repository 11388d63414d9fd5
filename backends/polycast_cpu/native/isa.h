// Which instructions are used. A function for others than the compiler was told of names them as its target; who calls it
// has asked the processor.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polycast_cpu {

enum class Isa : int64_t { plain = 0, vnni = 1, amx = 2 };

}  // namespace polycast_cpu
