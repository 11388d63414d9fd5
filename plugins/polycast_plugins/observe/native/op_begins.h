// Record the beginning of an op: its schema, its inputs, and the device whose autocast it reached.
//
// Locks: a ThreadRecord's. The GIL is taken as in nonfinite.h.

#pragma once

#include "autocast.h"
#include "entered_regions.h"
#include "numerics.h"
#include "op_infos.h"
#include "values.h"
#include "thread_state.h"

namespace {

// Return the op of an event; null: the event is not of an op. Known ops are found by the address of the name, which is then compared.
const OpInfo* op_of(ThreadState& state, const at::RecordFunction& event) {
  const char* const name = event.name();
  const uint64_t generation = OpInfos::generation.load(std::memory_order_relaxed);
  if (generation != state.ops_generation) {
    state.ops.clear();
    state.ops_generation = generation;
  }
  if (const auto found = state.ops.find(name); found != state.ops.end()) {
    const std::string& known = found->second->name;
    const size_t length = std::strlen(name);
    const char* const overload = event.overload_name();
    if (known.compare(0, length, name) == 0 &&
        (known.size() == length ? *overload == '\0' : known.compare(length + 1, std::string::npos, overload) == 0)) {
      return found->second;
    }
  }
  const OpInfo* const info = OpInfos::all().of(event);
  if (info != nullptr) {
    state.ops[name] = info;
  }
  return info;
}

// The Autocast keys, by device.
const std::array<DispatchKey, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& autocast_keys() {
  static const auto keys = [] {
    std::array<DispatchKey, c10::COMPILE_TIME_MAX_DEVICE_TYPES> found{};
    for (const DispatchKey key : c10::autocast_dispatch_keyset) {
      found[static_cast<size_t>(c10::dispatchKeyToDeviceType(key_below(key)))] = key;
    }
    return found;
  }();
  return keys;
}

// Return the device whose autocast a tensor reaches, by its dispatch keys; -1: none.
int8_t device_of_autocast(const Tensor& tensor, const c10::impl::LocalDispatchKeySet& keys) {
  const auto& known = autocast_keys();
  const auto is_active = [&](size_t device) {
    return known[device] != DispatchKey::Undefined && !keys.excluded_.has(known[device]);
  };
  if (!tensor.key_set().has(DispatchKey::Python)) {
    const auto device = static_cast<size_t>(tensor.device().type());
    return is_active(device) ? static_cast<int8_t>(device) : -1;
  }
  for (size_t device = 0; device < known.size(); ++device) {
    if (is_active(device) && tensor.key_set().has(known[device])) {
      return static_cast<int8_t>(device);
    }
  }
  return -1;
}

// Record where an input of an op in the forward pass comes from.
void add_source(ObservedOp& op, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  const Producer* const producer = op.state->producers.find(tensor);
  if (has_known_sizes(tensor) && tensor.dim() > 0 && (dtype == at::kFloat || is_fast(dtype))) {
    SourceCounts source{.dtype = dtype, .is_first = op.sources.empty(), .count = 1, .bytes = bytes_of(tensor)};
    if (producer != nullptr) {
      source.op = producer->op;
      source.asked_from = producer->asked_from;
    }
    op.sources.push_back({tensor.unsafeGetTensorImpl(), producer == nullptr ? Modules() : producer->modules, source});
  }
  if (producer != nullptr) {
    if (is_fast(producer->computes)) {
      op.fast_before = producer->op;
    } else if (op.fast_before == nullptr) {
      op.fast_before = producer->fast_before;
    }
    if (op.op->copies && !op.copied) {
      op.copied = *producer;
    }
  }
}

void add_input(ObservedOp& op, const Tensor& tensor, const c10::impl::LocalDispatchKeySet& keys) {
  if (op.device < 0) {
    op.device = device_of_autocast(tensor, keys);
  }
  const bool keeps_inputs = op.state->looks_for_nonfinite || op.state->numerics;
  if (keeps_inputs) {
    op.is_wrapped = op.is_wrapped || is_wrapper(tensor);
    if (tensor.is_floating_point() || tensor.is_complex()) {
      op.unchecked.push_back(tensor);
    }
  }
  if (!tensor.is_floating_point()) {
    return;
  }
  const ScalarType dtype = tensor.scalar_type();
  op.inputs.add({dtype});
  if (op.widest == ScalarType::Undefined || c10::elementSize(dtype) > c10::elementSize(op.widest)) {
    op.widest = dtype;
  }
  if (has_known_sizes(tensor) && tensor.dim() > 0) {
    op.fast_inputs += is_fast(dtype);
    op.float32_inputs += dtype == at::kFloat;
  }
  if ((!op.backward || keeps_inputs) && tensor.has_storage()) {
    op.storages.push_back(storage_of(tensor));
  }
  if (!op.backward) {
    add_source(op, tensor);
  }
}

// Check the inputs that an op writes before it runs. The others are checked only if an output is not finite.
void check_written_inputs(ObservedOp& op, c10::ArrayRef<const c10::IValue> inputs) {
  const auto& written = op.op->written;
  const auto& out = op.op->out;
  op.inputs_were_finite = std::all_of(inputs.begin(), inputs.end(), is_finite_number);
  if (written.empty()) {
    return;
  }
  c10::SmallVector<const StorageImpl*, 2> changed, replaced;
  for (const size_t i : written) {
    const bool is_out = std::find(out.begin(), out.end(), i) != out.end();
    if (i < inputs.size()) {
      each_tensor(inputs[i], [&](const Tensor& tensor) {
        if (tensor.has_storage()) {
          (is_out ? replaced : changed).push_back(storage_of(tensor));
        }
      });
    }
  }
  decltype(op.unchecked) others;
  for (Tensor& tensor : op.unchecked) {
    if (has_storage_among(changed, tensor)) {
      op.inputs_were_finite = op.inputs_were_finite && (!op.state->looks_for_nonfinite || is_finite(tensor));
      if (op.numerics != nullptr) {
        op.numerics->knows_inputs = false;
      }
      if (op.op->returns == 0) {
        op.changed.push_back(std::move(tensor));
      }
    } else if (!has_storage_among(replaced, tensor)) {
      others.push_back(std::move(tensor));
    }
  }
  op.unchecked = std::move(others);
}

// Return the inputs of an event. A boxed call may have other values below them on its stack.
c10::ArrayRef<const c10::IValue> inputs_of(const OpInfo& op, const at::RecordFunction& event) {
  const auto inputs = event.inputs();
  return inputs.size() > op.arguments ? inputs.slice(inputs.size() - op.arguments) : inputs;
}

std::unique_ptr<at::ObserverContext> begin_inner_matmul(ThreadState& state, const OpInfo* info, const at::RecordFunction& event) {
  if (info == nullptr || info->flops == nullptr || state.in_matmul) {
    return nullptr;
  }
  auto part = std::make_unique<InnerMatmul>();
  part->outer = state.op;
  part->formula = info->flops(inputs_of(*info, event));
  state.in_matmul = true;
  return part;
}

void count_compiled(ThreadState& state, const char* region) {
  for (const auto& record : state.records) {
    const int module = record->module();
    std::lock_guard<std::mutex> lock(record->mutex);
    ++record->totals.compiled[{region, module}];
  }
  note_compiled_in_regions(state);
}

std::unique_ptr<ObservedOp> new_op(
    ThreadState& state, const OpInfo* info, c10::ArrayRef<const c10::IValue> inputs, const c10::impl::LocalDispatchKeySet& keys) {
  auto op = std::make_unique<ObservedOp>();
  op->state = &state;
  op->op = info;
  op->outer = state.op;
  op->inner = state.op != nullptr;
  op->backward = state.records.front()->in_node();
  for (const c10::IValue& input : inputs) {
    each_tensor(input, [&](const Tensor& tensor) { add_input(*op, tensor, keys); });
  }
  return op;
}

std::unique_ptr<at::ObserverContext> begin_op(ThreadState& state, const at::RecordFunction& event) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  ObservedOp* const outer = state.op;
  const bool autocast_is_excluded = keys.excluded_.has_all(c10::autocast_dispatch_keyset);
  // Inner ops are counted if they reach autocast, and checked for inf and nan if they run on what a wrapper wraps.
  const bool in_wrapper = outer != nullptr && state.looks_for_nonfinite && outer->is_wrapped && !state.checks_inner_op;
  if (outer != nullptr && autocast_is_excluded && !in_wrapper) {
    const bool may_be_inner_matmul = !state.in_matmul && state.uncounted == 0 && !is_traced();
    return may_be_inner_matmul ? begin_inner_matmul(state, op_of(state, event), event) : nullptr;
  }
  if (state.uncounted != 0 || is_traced()) {
    return nullptr;
  }
  const OpInfo* const info = op_of(state, event);
  if (info == nullptr) {
    if (std::strncmp(event.name(), "Torch-Compiled Region", 21) == 0) {
      count_compiled(state, event.name());
    }
    return nullptr;
  }
  if (!info->has_tensors) {  // such as a question about the processor
    return nullptr;
  }
  const auto inputs = inputs_of(*info, event);
  auto op = new_op(state, info, inputs, keys);
  if (outer != nullptr && (op->device < 0 || outer->op == info || autocast_is_excluded)) {
    if (outer->op == info && outer->device < 0 && op->device >= 0) {  // a mode or a subclass calls the op again
      outer->device = op->device;
      outer->fast = at::autocast::get_autocast_dtype(static_cast<DeviceType>(op->device));
    }
    if (!in_wrapper) {
      return begin_inner_matmul(state, info, event);
    }
    check_written_inputs(*op, inputs);
    op->only_checks = state.checks_inner_op = true;
    outer->checks = false;
    return op;
  }
  if (state.numerics) {
    begin_numerics(*op, inputs);
  }
  if (state.looks_for_nonfinite || op->numerics != nullptr) {
    check_written_inputs(*op, inputs);
  }
  if (op->device >= 0) {
    const auto device = static_cast<DeviceType>(op->device);
    op->fast = at::autocast::get_autocast_dtype(device);
    op->override = engine.override(device);
    note_op_in_region(state, op->device);
  }
  if (info->flops != nullptr && !state.in_matmul) {
    op->formula = info->flops(inputs);
    op->is_matmul = state.in_matmul = true;
  }
  state.set_op(op.get());
  op->is_timed = state.timing;
  if (op->is_timed) {
    op->began = std::chrono::steady_clock::now();
  }
  return op;
}

}  // namespace
