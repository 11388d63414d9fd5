// Functions of one bfloat16 or float16 number, read from tables of all their results, which torch's kernels compute once. So results
// have the bits of torch's kernels, which convert each number to float32 and back. Gradients are within rounding of torch's.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu_backward_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>
#include <ATen/ops/mish_backward_cpu_dispatch.h>
#include <ATen/ops/mish_cpu_dispatch.h>
#include <ATen/ops/sigmoid_cpu_dispatch.h>
#include <ATen/ops/silu_backward_cpu_dispatch.h>
#include <ATen/ops/silu_cpu_dispatch.h>
#include <ATen/ops/tanh_cpu_dispatch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "parts.h"

namespace polycast_cpu {

// Computes denormal numbers on this thread as such, whatever torch.set_flush_denormal() says: tables outlive that.
struct WithDenormals {
#if defined(__x86_64__)
  static constexpr unsigned kFlush = 0x8040;
  const unsigned before = _mm_getcsr();
  WithDenormals() { _mm_setcsr(before & ~kFlush); }
  ~WithDenormals() { _mm_setcsr(before); }
#endif
};

constexpr size_t kNumbers = size_t{1} << 16;

// Return the values of a function that torch computes in `Wide`, by the bits of numbers of type T.
template <typename T, typename Wide, typename Value, typename Function>
std::unique_ptr<std::array<Value, kNumbers>> make_table(const Function& function) {
  constexpr int64_t kPart = 1 << 14;  // torch computes so few on this thread
  auto table = std::make_unique<std::array<Value, kNumbers>>();
  std::vector<Wide> numbers(kPart);
  const WithDenormals with_denormals;
  for (size_t begin = 0; begin < kNumbers; begin += kPart) {
    for (int64_t i = 0; i < kPart; ++i) {
      numbers[i] = static_cast<Wide>(T(static_cast<uint16_t>(begin + i), T::from_bits()));
    }
    const at::Tensor values = function(at::from_blob(numbers.data(), {kPart}, c10::CppTypeToScalarType<Wide>::value));
    const auto* const computed = values.const_data_ptr<Wide>();
    std::transform(computed, computed + kPart, table->data() + begin, [](Wide value) {
      if constexpr (std::is_same_v<Value, uint16_t>) {
        return value.x;  // the bits
      } else {
        return static_cast<Value>(value);
      }
    });
  }
  return table;
}

// A table that the first thread to need it makes. Without a lock, which a fork could leave locked: threads may make it twice, and one is
// kept.
template <typename Value>
class Table {
 public:
  template <typename Make>
  const Value* find(const Make& make) {
    if (const Values* const found = kept_.load(std::memory_order_acquire)) {
      return found->data();
    }
    std::unique_ptr<Values> made = make();
    const Values* other = nullptr;
    return (kept_.compare_exchange_strong(other, made.get(), std::memory_order_acq_rel) ? made.release() : other)->data();
  }

 private:
  using Values = std::array<Value, kNumbers>;

  std::atomic<const Values*> kept_{nullptr};
};

template <bool by_tanh>
struct Gelu {
  static constexpr c10::string_view kApproximate = by_tanh ? "tanh" : "none";
  static at::Tensor compute(const at::Tensor& x) { return at::cpu::gelu(x, kApproximate); }
  static at::Tensor derive(const at::Tensor& gradient, const at::Tensor& x) {
    return at::cpu::gelu_backward(gradient, x, kApproximate);
  }
};

struct Silu {
  static at::Tensor compute(const at::Tensor& x) { return at::cpu::silu(x); }
  static at::Tensor derive(const at::Tensor& gradient, const at::Tensor& x) { return at::cpu::silu_backward(gradient, x); }
};

struct Mish {
  static at::Tensor compute(const at::Tensor& x) { return at::cpu::mish(x); }
  static at::Tensor derive(const at::Tensor& gradient, const at::Tensor& x) { return at::cpu::mish_backward(gradient, x); }
};

struct Sigmoid {
  static at::Tensor compute(const at::Tensor& x) { return at::cpu::sigmoid(x); }
};

struct Tanh {
  static at::Tensor compute(const at::Tensor& x) { return at::cpu::tanh(x); }
};

// Return the table of a function of numbers of type T, by their bits.
template <typename Function, typename T>
const uint16_t* results_of() {
  static Table<uint16_t> table;
  return table.find([] { return make_table<T, T, uint16_t>(Function::compute); });
}

// Return the table of its derivatives in float32, computed in float64: torch's backwards of float32 are not exact enough.
template <typename Function, typename T>
const float* derivatives_of() {
  const auto derive = [](const at::Tensor& x) {
    std::vector<double> ones(x.size(0), 1.0);
    return Function::derive(at::from_blob(ones.data(), x.sizes(), at::kDouble), x);
  };
  static Table<float> table;
  return table.find([&] { return make_table<T, double, float>(derive); });
}

inline at::Tensor empty_as(const at::Tensor& x) {
  return at::Tensor(at::detail::empty_strided_cpu(x.sizes(), x.strides(), x.scalar_type()));
}

// Call a function with a number of the fast dtype.
template <typename Call>
at::Tensor with_type(at::ScalarType dtype, const Call& call) {
  return dtype == at::kHalf ? call(at::Half()) : call(at::BFloat16());
}

// Return a function of each element of a dense tensor of bfloat16 or float16 numbers.
template <typename Function>
at::Tensor look_up(const at::Tensor& x) {
  return with_type(x.scalar_type(), [&]<typename T>(T) {
    const uint16_t* const results = results_of<Function, T>();
    at::Tensor out = empty_as(x);
    const auto* const from = static_cast<const uint16_t*>(x.const_data_ptr());
    auto* const to = static_cast<uint16_t*>(out.mutable_data_ptr());
    for_each_part(x.numel(), grain(1), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        to[i] = results[from[i]];
      }
    });
    return out;
  });
}

// Return the gradient of `x` for a gradient of the result, of the same dtype, sizes and strides.
template <typename Function>
at::Tensor look_up_gradient(const at::Tensor& gradient, const at::Tensor& x) {
  return with_type(x.scalar_type(), [&]<typename T>(T) {
    const float* const derivatives = derivatives_of<Function, T>();
    at::Tensor out = empty_as(x);
    const auto* const at = static_cast<const uint16_t*>(x.const_data_ptr());
    const auto* const from = static_cast<const T*>(gradient.const_data_ptr());
    auto* const to = static_cast<T*>(out.mutable_data_ptr());
    for_each_part(x.numel(), grain(1), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        to[i] = static_cast<float>(from[i]) * derivatives[at[i]];
      }
    });
    return out;
  });
}

}  // namespace polycast_cpu
