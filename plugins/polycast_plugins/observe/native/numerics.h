// Counts the values that ops compute and cast. Tensors in host memory are read once, by magnitudes.h; for others torch's ops count on
// the device, without synchronizing.
//
// Locks: a ThreadRecord's. None is held while torch's ops run or a tensor is destroyed. The GIL is taken as in nonfinite.h.

#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include "lost_products.h"
#include "magnitudes.h"
#include "nonfinite.h"
#include "values.h"
#include "numerics_counts.h"
#include "thread_state.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Return whether every value of a dtype is exact in another.
bool is_wider(ScalarType source, ScalarType target) {
  return target == at::kDouble || (target == at::kFloat && source != at::kDouble);
}

// Return whether a tensor's values can be read without changing what runs.
bool is_countable(const Tensor& tensor) {
  return tensor.is_floating_point() && !is_wrapper(tensor) && has_known_sizes(tensor) && !is_sparse(tensor) && is_in_memory(tensor);
}

// Return whether an output is an input or a view of one.
bool is_input(const ObservedOp& op, const Tensor& output) {
  return op.op->written.empty() && has_storage_among(op.storages, output);
}

Tensor as_numbers(const Tensor& tensor) { return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat); }

// The smallest normal magnitude of a dtype.
double smallest_normal(ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::min();
    case at::kHalf:
      return 0x1p-14;
    case at::kFloat8_e5m2:
      return 0x1p-14;
    case at::kFloat8_e5m2fnuz:
      return 0x1p-15;
    case at::kFloat8_e4m3fn:
      return 0x1p-6;
    case at::kFloat8_e4m3fnuz:
      return 0x1p-7;
    default:
      return std::numeric_limits<float>::min();
  }
}

// Count by torch's ops. `source` is undefined, or holds the values before a cast.
CountsOnDevice count_by_ops(const Tensor& source, const Tensor& values) {
  const Tensor after = as_numbers(values), before = source.defined() ? as_numbers(source) : after;
  const Tensor magnitude = before.abs(), is_finite = magnitude.lt(kInfinity);
  const Tensor is_nonfinite = after.abs().lt(kInfinity).logical_not(), is_small = after.abs().lt(smallest_normal(values.scalar_type()));
  Tensor zeroed, underflowed, overflowed;
  if (source.defined()) {
    zeroed = after.eq(0).logical_and(before.ne(0));
    const Tensor was_normal = magnitude.ge(smallest_normal(source.scalar_type()));
    underflowed = zeroed.logical_or(is_small.logical_and(was_normal));
    overflowed = is_nonfinite.logical_and(is_finite);
  } else {
    underflowed = is_small.logical_and(after.ne(0));
    zeroed = overflowed = after.new_zeros({}, at::kBool);
  }
  const Tensor counts = at::stack({underflowed.sum(), overflowed.sum(), zeroed.sum(), is_nonfinite.sum()});
  return {counts, magnitude.where(is_finite, 0).amax()};
}

NumericsCounts counts_of(const Magnitudes& found, uint64_t count, ScalarType read, bool is_cast) {
  NumericsCounts counts;
  counts.count = count;
  counts.underflowed = found.below_underflow - found.zeros;
  counts.zeroed = found.below_zeroed - found.zeros;
  counts.overflowed = is_cast ? found.from_overflow - found.from_nonfinite : 0;
  counts.nonfinite = found.from_overflow;
  counts.amax = value_of(found.largest, read);
  return counts;
}

// Return, as a 0-dim tensor, how many zeros of a backward matmul underflowed. Of mm and bmm: those to which a product of two nonzero
// values was added. Of others: all elements, if all are zero and the first input is not.
Tensor count_lost(const ObservedOp& op, const Tensor& values) {
  const Tensor is_zero = values.eq(0);
  if (op.op->multiplies && op.unchecked.size() == 2) {
    const auto ones = [&](size_t input) { return op.unchecked[input].ne(0).to(values.scalar_type()); };
    return is_zero.logical_and(ones(0).matmul(ones(1)).ne(0)).sum();
  }
  return is_zero.all().logical_and(op.unchecked.front().ne(0).any()).mul(values.numel());
}

// Return how many of the zeros of a result in host memory lost what they were computed from; see count_lost().
uint64_t count_lost_in_memory(const ObservedOp& op, const Tensor& values, uint64_t zeros) {
  const auto& inputs = op.unchecked;
  if (std::any_of(inputs.begin(), inputs.end(), [](const Tensor& input) { return !is_fast(input.scalar_type()) || !input.is_cpu(); })) {
    return count_lost(op, values).item<int64_t>();  // autocast has cast them
  }
  if (op.op->multiplies && inputs.size() == 2) {
    return count_lost_products(inputs[0], inputs[1], values, zeros);
  }
  const uint64_t elements = values.numel();
  return zeros == elements && inputs.front().ne(0).any().item<bool>() ? elements : 0;
}

// Return whether zeros among the values may have lost what they were computed from.
bool may_lose(const ObservedOp& op, const Tensor& values) {
  return op.backward && op.op->flops != nullptr && is_fast(values.scalar_type()) && !op.unchecked.empty() &&
      std::all_of(op.unchecked.begin(), op.unchecked.end(), is_countable);
}

// Return whether all inputs are finite, as a 0-dim tensor.
Tensor all_inputs_finite(const ObservedOp& op, const Tensor& like) {
  Tensor all = like.new_full({}, op.inputs_were_finite && op.numerics->knows_inputs, at::kBool);
  for (const Tensor& input : op.unchecked) {
    if (is_countable(input) && input.numel() != 0 && input.device() == like.device()) {
      all = all.logical_and(as_numbers(input).abs().amax().lt(kInfinity));
    }
  }
  return all;
}

// Count the elements of a result by torch's ops.
CountsOnDevice count_result_by_ops(const ObservedOp& op, const Tensor& values) {
  CountsOnDevice found = count_by_ops(Tensor(), values);
  found.counts.select(0, 1).copy_(found.counts.select(0, 3).mul(all_inputs_finite(op, values)));
  if (may_lose(op, values)) {
    const Tensor lost = count_lost(op, values);
    found.counts.select(0, 0).add_(lost);
    found.counts.select(0, 2).add_(lost);
  }
  return found;
}

NumericsCounts count_result_in_memory(const ObservedOp& op, const Tensor& values, const Bounds& bounds) {
  const Magnitudes found = count_magnitudes(values, bounds);
  NumericsCounts counts = counts_of(found, values.numel(), values.scalar_type(), /*is_cast=*/false);
  if (counts.nonfinite != 0 && op.inputs_were_finite && op.numerics->knows_inputs &&
      std::all_of(op.unchecked.begin(), op.unchecked.end(), is_finite)) {
    counts.overflowed = counts.nonfinite;
  }
  if (found.zeros != 0 && may_lose(op, values)) {
    const uint64_t lost = count_lost_in_memory(op, values, found.zeros);
    counts.underflowed += lost;
    counts.zeroed += lost;
  }
  return counts;
}

// Count the values of a result, or of a cast from `source`.
NumericsCounts count(const ObservedOp& op, const Tensor& source, const Tensor& values) {
  const Unobserved unobserved;
  const bool is_cast = source.defined();
  const Tensor& read = is_cast ? source : values;
  const Bounds* const bounds = bounds_of(read.scalar_type(), values.scalar_type());
  if (bounds != nullptr && read.is_cpu()) {
    const Tensor dense = read.is_non_overlapping_and_dense() ? read : read.contiguous();
    return is_cast ? counts_of(count_magnitudes(dense, *bounds), dense.numel(), dense.scalar_type(), true)
                   : count_result_in_memory(op, dense, *bounds);
  }
  NumericsCounts counts;
  counts.count = values.numel();
  counts.on_devices.push_back(is_cast ? count_by_ops(source, values) : count_result_by_ops(op, values));
  counts.on_devices.back().stream = current_stream(values);
  return counts;
}

// Count values for an op; those that cannot be counted are left out.
void count_values(ObservedOp& op, ValuesOf of, const Tensor& source, const Tensor& values) {
  const ScalarType from = source.defined() ? source.scalar_type() : ScalarType::Undefined;
  if (!is_countable(values) || values.numel() == 0 ||
      (source.defined() && (!is_countable(source) || is_wider(from, values.scalar_type())))) {
    return;
  }
  run_ops([&] {
    if (values.is_cpu() || !is_captured(values)) {
      op.numerics->counted.push_back({of, from, values.scalar_type(), count(op, source, values)});
    }
  });
}

// Count floats while the engine casts them, block by block: from the processor's cache. See ObservedCall.
void count_while_cast(ObservedCall& call, polycast::CastFloats cast, const float* from, uint16_t* to, int64_t count, ScalarType dtype) {
  constexpr int64_t kBlock = 1 << 15;
  Magnitudes found;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    cast(from + begin, to + begin, size);
    count_some(reinterpret_cast<const int32_t*>(from + begin), size, *bounds_of(at::kFloat, dtype), found);
  }
  OpNumerics& numerics = *static_cast<ObservedOp&>(call).numerics;
  const std::lock_guard<std::mutex> lock(numerics.of_cast);
  numerics.cast_count += count;
  numerics.cast_magnitudes.add(found);
}

// Count a cast that autocast has made for an op.
void count_cast(ObservedOp& op, const Tensor& tensor, const Tensor& cast, bool of_weight, bool made) {
  const ValuesOf of = of_weight ? ValuesOf::kWeight : ValuesOf::kActivation;
  const uint64_t known = std::exchange(op.numerics->cast_count, 0);
  const Magnitudes magnitudes = std::exchange(op.numerics->cast_magnitudes, Magnitudes());
  if (made && known != 0) {
    op.numerics->counted.push_back({of, tensor.scalar_type(), cast.scalar_type(), counts_of(magnitudes, known, tensor.scalar_type(), true)});
  } else if (made) {
    count_values(op, of, tensor, cast);
  }
}

// Start to count for an op: in the forward pass if it runs in a region, in the backward pass unless it is part of the forward pass that
// a checkpoint computes again, which was counted in the forward pass. In compiled code, ops do not reach autocast.
void begin_numerics(ObservedOp& op, c10::ArrayRef<const c10::IValue> inputs) {
  const bool computes_again = op.backward && at::GradMode::is_enabled() && !op.state->node_has_grad_mode;
  const bool in_region = op.device >= 0 || !op.state->regions.empty();
  const bool computes = !op.op->has_uninitialized_output && op.widest != ScalarType::Undefined;  // from floating-point tensors
  if (!computes || computes_again || (!op.backward && !in_region)) {
    return;
  }
  op.numerics = std::make_unique<OpNumerics>();
  op.cast_floats = &count_while_cast;
  if (op.op->moves && !op.inner) {
    const size_t source = op.op->written.empty() ? 0 : 1;  // of copy_(self, src)
    if (inputs.size() > source && inputs[source].isTensor()) {
      op.numerics->source = inputs[source].toTensor();
    }
  }
}

// Count the outputs of an op: of conversions as casts. An inner op makes what the outer op returns.
void count_outputs(ObservedOp& op, c10::ArrayRef<c10::IValue> outputs) {
  if (op.inner) {
    return;
  }
  const Tensor& source = op.numerics->source;
  for (const c10::IValue& output : outputs) {
    each_tensor(output, [&](const Tensor& tensor) {
      if (!is_countable(tensor) || is_input(op, tensor)) {
        return;
      }
      if (!op.op->moves) {
        count_values(op, ValuesOf::kResult, Tensor(), tensor);
      } else if (source.defined() && source.scalar_type() != tensor.scalar_type()) {
        count_values(op, ValuesOf::kActivation, source, tensor);
      }
    });
  }
}

// Add the counts of torch's ops to those of the same thread, device and stream.
void add_on_device(ThreadRecord& record, const NumericsKey& key, const CountsOnDevice& more) {
  const Unobserved unobserved;
  CountsOnDevice sum;
  {
    std::lock_guard<std::mutex> lock(record.mutex);
    for (const CountsOnDevice& each : record.totals.numerics[key].on_devices) {
      if (each.counts.device() == more.counts.device() && each.stream == more.stream) {
        sum = each;
      }
    }
  }
  if (sum.counts.defined()) {
    sum.counts.add_(more.counts);
    sum.amax.copy_(sum.amax.maximum(more.amax));
    return;
  }
  CountsOnDevice first{more.counts.clone(), more.amax.clone(), more.stream};
  std::lock_guard<std::mutex> lock(record.mutex);
  record.totals.numerics[key].on_devices.push_back(std::move(first));
}

// Add what was counted for an op to each record whose recorder asks for it.
void add_numerics(const ObservedOp& op) {
  for (const auto& record : op.state->records) {
    if (!record->recorder->numerics) {
      continue;
    }
    for (const Counted& counted : op.numerics->counted) {
      const NumericsKey key{
          .op = op.op, .module = record->module(), .backward = op.backward, .of = counted.of, .source = counted.source,
          .dtype = counted.dtype};
      const auto& on_devices = counted.counts.on_devices;
      const bool added = std::all_of(on_devices.begin(), on_devices.end(), [&](const CountsOnDevice& each) {
        return run_ops([&] { add_on_device(*record, key, each); });
      });
      if (added) {
        std::lock_guard<std::mutex> lock(record->mutex);
        record->totals.numerics[key].add_numbers(counted.counts);
      }
    }
  }
}

}  // namespace
