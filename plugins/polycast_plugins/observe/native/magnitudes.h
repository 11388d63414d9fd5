// Counts the values of a tensor by magnitude, in one pass: those that a cast makes zero, subnormal or infinite, and the largest.
//
// Values are compared as integers: without their signs, the bits of two values have the order of the values.

#pragma once

#include <ATen/Version.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "parallel.h"
#include "tensors.h"

namespace {

// The smallest magnitudes, as bits, that do not become zero, that do not become zero or subnormal, that become inf or nan, and that
// are inf or nan. Zero is below the first two.
struct Bounds {
  int32_t zeroed, underflow, overflow, nonfinite;
};

// How many values are zero, and on which side of each bound they are.
struct Magnitudes {
  uint64_t zeros = 0, below_zeroed = 0, below_underflow = 0, from_overflow = 0, from_nonfinite = 0;
  int32_t largest = 0;  // that is finite, as bits

  void add(const Magnitudes& other) {
    zeros += other.zeros;
    below_zeroed += other.below_zeroed;
    below_underflow += other.below_underflow;
    from_overflow += other.from_overflow;
    from_nonfinite += other.from_nonfinite;
    largest = std::max(largest, other.largest);
  }
};

constexpr Bounds kHalfBounds{1, 0x0400, 0x7c00, 0x7c00};
constexpr Bounds kBFloat16Bounds{1, 0x0080, 0x7f80, 0x7f80};
constexpr Bounds kFloatBounds{1, 0x00800000, 0x7f800000, 0x7f800000};

// Casts round to the nearest, ties to even. A bfloat16 has the exponents of a float: a normal one stays normal.
constexpr Bounds kFloatToHalf{0x33000001, 0x387fe000, 0x477ff000, 0x7f800000};
constexpr Bounds kFloatToBFloat16{0x00008001, 0x00008001, 0x7f7f8000, 0x7f800000};
constexpr Bounds kBFloat16ToHalf{0x3301, 0x3880, 0x4780, 0x7f80};
constexpr Bounds kHalfToBFloat16{1, 1, 0x7c00, 0x7c00};

// Return the bounds for the values of a dtype, or for a cast; null: there are none.
const Bounds* bounds_of(ScalarType from, ScalarType to) {
  switch (from) {
    case at::kFloat:
      return to == at::kHalf ? &kFloatToHalf : to == at::kBFloat16 ? &kFloatToBFloat16 : to == at::kFloat ? &kFloatBounds : nullptr;
    case at::kBFloat16:
      return to == at::kHalf ? &kBFloat16ToHalf : to == at::kBFloat16 ? &kBFloat16Bounds : nullptr;
    case at::kHalf:
      return to == at::kBFloat16 ? &kHalfToBFloat16 : to == at::kHalf ? &kHalfBounds : nullptr;
    default:
      return nullptr;
  }
}

template <class Word, size_t kBytes>
struct VectorOf {
  typedef Word type __attribute__((vector_size(kBytes)));
};

template <class Word>
constexpr Word kWithoutSign = std::numeric_limits<Word>::max();

template <class Word>
[[gnu::always_inline]] inline void count_value(Word word, const Bounds& bounds, Magnitudes& counts) {
  const int32_t magnitude = word & kWithoutSign<Word>;
  counts.zeros += magnitude == 0;
  counts.below_zeroed += magnitude < bounds.zeroed;
  counts.below_underflow += magnitude < bounds.underflow;
  counts.from_overflow += magnitude >= bounds.overflow;
  counts.from_nonfinite += magnitude >= bounds.nonfinite;
  counts.largest = std::max(counts.largest, magnitude < bounds.nonfinite ? magnitude : 0);
}

template <class Vector>
[[gnu::always_inline]] inline uint64_t sum_of(const Vector& vector) {
  uint64_t sum = 0;
  for (size_t lane = 0; lane < sizeof(Vector) / sizeof(vector[0]); ++lane) {
    sum += vector[lane];
  }
  return sum;
}

// Count the values of a block on each side of the bounds. A lane counts at most `vectors`. A comparison is -1 where it is true.
template <class Word, size_t kBytes>
[[gnu::always_inline]] inline void count_sides(const Word* words, size_t vectors, const Bounds& bounds, Magnitudes& counts) {
  using Vector = typename VectorOf<Word, kBytes>::type;
  const Vector zero{}, to_zeroed = zero + static_cast<Word>(bounds.zeroed), to_underflow = zero + static_cast<Word>(bounds.underflow),
                       to_overflow = zero + static_cast<Word>(bounds.overflow),
                       to_nonfinite = zero + static_cast<Word>(bounds.nonfinite);
  Vector zeros{}, below_zeroed{}, below_underflow{}, from_overflow{}, from_nonfinite{}, largest{};
  for (size_t i = 0; i < vectors; ++i) {
    Vector values;
    std::memcpy(&values, words + i * (kBytes / sizeof(Word)), kBytes);
    values &= kWithoutSign<Word>;
    zeros -= values == zero;
    below_zeroed -= values < to_zeroed;
    below_underflow -= values < to_underflow;
    from_overflow -= values >= to_overflow;
    const auto is_nonfinite = values >= to_nonfinite;
    from_nonfinite -= is_nonfinite;
    values &= ~is_nonfinite;
    largest = values > largest ? values : largest;
  }
  counts.zeros += sum_of(zeros);
  counts.below_zeroed += sum_of(below_zeroed);
  counts.below_underflow += sum_of(below_underflow);
  counts.from_overflow += sum_of(from_overflow);
  counts.from_nonfinite += sum_of(from_nonfinite);
  for (size_t lane = 0; lane < kBytes / sizeof(Word); ++lane) {
    counts.largest = std::max<int32_t>(counts.largest, largest[lane]);
  }
}

// Most blocks are inside of all bounds, which their extremes show. The others are read again, from the processor's first cache.
template <class Word, size_t kBytes>
[[gnu::always_inline]] inline void count_words(const Word* words, size_t count, const Bounds& bounds, Magnitudes& counts) {
  using Vector = typename VectorOf<Word, kBytes>::type;
  constexpr size_t kLanes = kBytes / sizeof(Word), kBlock = 4096 / sizeof(Word);
  size_t begin = 0;
  while (count - begin >= kLanes) {
    const size_t vectors = std::min(count - begin, kBlock) / kLanes;
    Vector smallest = Vector{} + kWithoutSign<Word>, largest{};
    for (size_t i = 0; i < vectors; ++i) {
      Vector values;
      std::memcpy(&values, words + begin + i * kLanes, kBytes);
      values &= kWithoutSign<Word>;
      smallest = values < smallest ? values : smallest;
      largest = values > largest ? values : largest;
    }
    int32_t least = kWithoutSign<Word>, most = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      least = std::min<int32_t>(least, smallest[lane]);
      most = std::max<int32_t>(most, largest[lane]);
    }
    if (least < bounds.underflow || least == 0 || most >= bounds.overflow) {
      count_sides<Word, kBytes>(words + begin, vectors, bounds, counts);
    } else {
      counts.largest = std::max(counts.largest, most);
    }
    begin += vectors * kLanes;
  }
  for (; begin < count; ++begin) {
    count_value(words[begin], bounds, counts);
  }
}

template <class Word>
using CountWords = void (*)(const Word* words, size_t count, const Bounds& bounds, Magnitudes& counts);

#if defined(__x86_64__)

template <class Word>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void count_by_avx512(
    const Word* words, size_t count, const Bounds& bounds, Magnitudes& counts) {
  count_words<Word, 64>(words, count, bounds, counts);
}

template <class Word>
[[gnu::target("avx2")]] void count_by_avx2(const Word* words, size_t count, const Bounds& bounds, Magnitudes& counts) {
  count_words<Word, 32>(words, count, bounds, counts);
}

#endif

template <class Word>
void count_by_sixteen_bytes(const Word* words, size_t count, const Bounds& bounds, Magnitudes& counts) {
  count_words<Word, 16>(words, count, bounds, counts);
}

// Return the function for the instructions of this processor, of which ATEN_CPU_CAPABILITY may forbid some.
template <class Word>
CountWords<Word> counting_function() {
#if defined(__x86_64__)
  const std::string allowed = at::get_cpu_capability();
  __builtin_cpu_init();
  if (allowed == "AVX512" && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return &count_by_avx512<Word>;
  }
  if (allowed.rfind("AVX", 0) == 0 && __builtin_cpu_supports("avx2")) {
    return &count_by_avx2<Word>;
  }
#endif
  return &count_by_sixteen_bytes<Word>;
}

template <class Word>
void count_some(const Word* words, size_t count, const Bounds& bounds, Magnitudes& counts) {
  static const CountWords<Word> count_them = counting_function<Word>();
  count_them(words, count, bounds, counts);
}

// Count on torch's threads.
template <class Word>
Magnitudes count_all(const Word* words, int64_t count, const Bounds& bounds) {
  constexpr int64_t kGrain = 262144 / sizeof(Word);
  Magnitudes sum;
  std::mutex mutex;
  polycast::for_each_part(count, kGrain, [&](int64_t begin, int64_t end) {
    Magnitudes part;
    count_some(words + begin, end - begin, bounds, part);
    const std::lock_guard<std::mutex> lock(mutex);
    sum.add(part);
  });
  return sum;
}

// Count the values of a dense tensor in host memory.
Magnitudes count_magnitudes(const Tensor& tensor, const Bounds& bounds) {
  const void* const data = tensor.const_data_ptr();
  return tensor.itemsize() == 2 ? count_all(static_cast<const int16_t*>(data), tensor.numel(), bounds)
                                : count_all(static_cast<const int32_t*>(data), tensor.numel(), bounds);
}

// Return the value of a magnitude.
double value_of(int32_t magnitude, ScalarType dtype) {
  if (dtype == at::kHalf) {
    return c10::Half(static_cast<uint16_t>(magnitude), c10::Half::from_bits());
  }
  const uint32_t bits = dtype == at::kBFloat16 ? static_cast<uint32_t>(magnitude) << 16 : static_cast<uint32_t>(magnitude);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace
