// Counts of what ops compute and cast: magnitudes, underflow and overflow.
//
// Locks: none; a ThreadRecord's mutex guards the counts in it.

#pragma once

#include <tuple>

#include "magnitudes.h"
#include "tensors.h"

namespace {

struct OpInfo;

enum class ValuesOf : int8_t { kWeight, kActivation, kResult };
constexpr const char* kValuesOf[] = {"weight", "activation", "result"};

// Values that are counted together: those of an op in a module, in one pass and dtype.
struct NumericsKey {
  const OpInfo* op;
  int module;
  bool backward;
  ValuesOf of;
  ScalarType source, dtype;  // before a cast, or Undefined; after it

  auto key() const { return std::tie(op, module, backward, of, source, dtype); }
  bool operator<(const NumericsKey& other) const { return key() < other.key(); }
};

// Counts by torch's ops. They stay on the tensor's device until they are read.
struct CountsOnDevice {
  Tensor counts;  // int64: underflowed, overflowed, zeroed, nonfinite
  Tensor amax;    // of float32 or float64
  std::optional<c10::Stream> stream;
};

struct NumericsCounts {
  uint64_t count = 0, underflowed = 0, overflowed = 0, zeroed = 0, nonfinite = 0;
  double amax = 0;
  c10::SmallVector<CountsOnDevice, 0> on_devices;  // at most one for each thread, device and stream

  void add_numbers(const NumericsCounts& other) {
    count += other.count;
    underflowed += other.underflowed;
    overflowed += other.overflowed;
    zeroed += other.zeroed;
    nonfinite += other.nonfinite;
    amax = std::max(amax, other.amax);
  }

  void add(const NumericsCounts& other) {
    add_numbers(other);
    on_devices.append(other.on_devices.begin(), other.on_devices.end());
  }
};

// The values of one tensor, as an op has counted them.
struct Counted {
  ValuesOf of;
  ScalarType source, dtype;
  NumericsCounts counts;
};

// The numerics of an op while it runs.
struct OpNumerics {
  bool knows_inputs = true;   // it does not write to any
  Tensor source;              // of a conversion
  uint64_t cast_count = 0;    // the values that were counted while the engine cast them
  Magnitudes cast_magnitudes;  // and their magnitudes
  std::mutex of_cast;         // guards these two
  c10::SmallVector<Counted, 3> counted;
};

}  // namespace
