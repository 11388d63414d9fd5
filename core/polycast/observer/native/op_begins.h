// What is seen of an op before it runs: which it is, what it is given, and whose autocast looks at it.
//
// Owns nothing. Locks: a table's.

#pragma once

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "autocast.h"
#include "entries.h"
#include "nonfinite.h"
#include "op_infos.h"
#include "values.h"
#include "watch.h"

namespace {

// The op of an event, or null where it is another range. It is told by the address of its name, and by the name.
const OpInfo* op_of(Watch& watch, const at::RecordFunction& event) {
  const char* const name = event.name();
  const uint64_t generation = OpInfos::generation.load(std::memory_order_relaxed);
  if (generation != watch.ops_generation) {
    watch.ops.clear();
    watch.ops_generation = generation;
  }
  const auto found = watch.ops.find(name);
  if (found != watch.ops.end()) {
    const std::string& known = found->second->name;
    const size_t length = std::strlen(name);
    if (known.compare(0, length, name) == 0 &&
        (known.size() == length ? *event.overload_name() == '\0' : known.compare(length + 1, std::string::npos, event.overload_name()) == 0)) {
      return found->second;
    }
  }
  const OpInfo* const info = OpInfos::all().of(event);
  if (info != nullptr) {
    watch.ops[name] = info;
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

// What is traced does not run.
bool is_traced() {
  using Mode = c10::impl::TorchDispatchModeKey;
  using Modes = c10::impl::TorchDispatchModeTLS;
  return Modes::any_modes_set() &&
      (Modes::get_mode(Mode::FAKE) || Modes::get_mode(Mode::PROXY) || Modes::get_mode(Mode::FUNCTIONAL));
}

// The device whose autocast looks at a tensor, as its dispatch keys have it; -1: none.
int8_t device_of_autocast(const Tensor& tensor, const c10::impl::LocalDispatchKeySet& keys) {
  const auto& known = autocast_keys();
  if (!tensor.key_set().has(DispatchKey::Python)) {
    const auto device = static_cast<size_t>(tensor.device().type());
    return known[device] != DispatchKey::Undefined && !keys.excluded_.has(known[device]) ? static_cast<int8_t>(device) : -1;
  }
  const auto its = tensor.key_set();
  for (size_t device = 0; device < known.size(); ++device) {
    if (known[device] != DispatchKey::Undefined && its.has(known[device]) && !keys.excluded_.has(known[device])) {
      return static_cast<int8_t>(device);
    }
  }
  return -1;
}

// Note where a tensor that an op is given came from.
void note_given(ObservedOp& op, const Tensor& tensor, const Producer* producer) {
  const bool is_known = producer != nullptr && producer->op != nullptr;
  op.given.push_back(
      {tensor.unsafeGetTensorImpl(), is_known ? producer->modules : Modules(),
       SourceCounts{is_known ? producer->op : nullptr, kNoModule, tensor.scalar_type(), ScalarType::Undefined,
                    op.given.empty(), is_known ? producer->asked_from : ScalarType::Undefined, 1, bytes_of(tensor)}});
}

void look_at_input(ObservedOp& op, const Tensor& tensor, const c10::impl::LocalDispatchKeySet& keys) {
  if (op.device < 0) {
    op.device = device_of_autocast(tensor, keys);
  }
  if (op.watch->looks_for_nonfinite) {
    op.is_wrapped = op.is_wrapped || is_wrapper(tensor);
    if (tensor.is_floating_point() || tensor.is_complex()) {
      op.tensors.push_back(tensor);
    }
  }
  if (!tensor.is_floating_point()) {
    return;
  }
  const ScalarType dtype = tensor.scalar_type();
  op.inputs.add(dtype);
  if (op.widest == ScalarType::Undefined || c10::elementSize(dtype) > c10::elementSize(op.widest)) {
    op.widest = dtype;
  }
  if (has_known_sizes(tensor) && tensor.dim() > 0) {
    op.fast_inputs += is_fast(dtype);
    op.float32_inputs += dtype == at::kFloat;
  }
  if ((!op.backward || op.watch->looks_for_nonfinite) && tensor.has_storage()) {
    op.storages.push_back(storage_of(tensor));
  }
  if (!op.backward) {
    const Producer* const producer = op.watch->producers.find(tensor);
    if (has_known_sizes(tensor) && tensor.dim() > 0 && (dtype == at::kFloat || is_fast(dtype))) {
      note_given(op, tensor, producer);
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
}

// Of what an op writes it is asked before whether it was finite, and of other inputs when its outputs are not.
void look_at_written(ObservedOp& op, c10::ArrayRef<const c10::IValue> inputs) {
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
  const auto has = [](const auto& storages, const Tensor& tensor) {
    return tensor.has_storage() && std::find(storages.begin(), storages.end(), storage_of(tensor)) != storages.end();
  };
  decltype(op.tensors) others;
  for (Tensor& tensor : op.tensors) {
    if (has(changed, tensor)) {
      op.inputs_were_finite = op.inputs_were_finite && is_finite(tensor);
    } else if (!has(replaced, tensor)) {
      others.push_back(std::move(tensor));
    }
  }
  op.tensors = std::move(others);
}

// Return what an event was given, without what a whole stack has below it.
c10::ArrayRef<const c10::IValue> inputs_of(const OpInfo& op, const at::RecordFunction& event) {
  const auto inputs = event.inputs();
  return inputs.size() > op.arguments ? inputs.slice(inputs.size() - op.arguments) : inputs;
}

// An op inside one that is counted, which is not counted itself: of one that multiplies matrices the operations are the outer one's.
std::unique_ptr<at::ObserverContext> start_part(Watch& watch, const OpInfo* info, const at::RecordFunction& event) {
  if (info == nullptr || info->flops == nullptr || watch.in_matmul) {
    return nullptr;
  }
  auto part = std::make_unique<ObservedPart>();
  part->outer = watch.op;
  part->formula = info->flops(inputs_of(*info, event));
  watch.in_matmul = true;
  return part;
}

std::unique_ptr<at::ObserverContext> start_op(Watch& watch, const at::RecordFunction& event) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  // Inside another op those count that autocast looks at. Those that run on what is in a wrapper are looked at, too.
  const bool in_wrapper = watch.op != nullptr && watch.looks_for_nonfinite && watch.op->is_wrapped && !watch.looking;
  if (watch.op != nullptr && keys.excluded_.has_all(c10::autocast_dispatch_keyset) && !in_wrapper) {
    const bool is_part = !watch.in_matmul && watch.compiling == 0 && !is_traced();
    return is_part ? start_part(watch, op_of(watch, event), event) : nullptr;
  }
  if (watch.compiling != 0 || is_traced()) {
    return nullptr;
  }
  const OpInfo* const info = op_of(watch, event);
  if (info == nullptr) {
    if (std::strncmp(event.name(), "Torch-Compiled Region", 21) == 0) {
      for (const auto& table : watch.tables) {
        const int module = table->module();
        std::lock_guard<std::mutex> lock(table->mutex);
        ++table->compiled[{event.name(), module}];
      }
      note_compiled_in_regions(watch);
    }
    return nullptr;
  }
  auto op = std::make_unique<ObservedOp>();
  op->watch = &watch;
  op->op = info;
  op->outer = watch.op;
  op->inner = watch.op != nullptr;
  op->backward = watch.tables.front()->in_node();
  const auto inputs = inputs_of(*info, event);
  for (const c10::IValue& input : inputs) {
    each_tensor(input, [&](const Tensor& tensor) { look_at_input(*op, tensor, keys); });
  }
  if (watch.op != nullptr && (op->device < 0 || watch.op->op == info || keys.excluded_.has_all(c10::autocast_dispatch_keyset))) {
    const bool is_called_again = watch.op->op == info;
    if (is_called_again && watch.op->device < 0) {  // by a mode or a subclass
      watch.op->device = op->device;
      watch.op->fast = op->device < 0 ? watch.op->fast : at::autocast::get_autocast_dtype(static_cast<DeviceType>(op->device));
    }
    if (!in_wrapper) {
      return start_part(watch, info, event);
    }
    op->only_looks = watch.looking = true;
    watch.op->looks = false;
    look_at_written(*op, inputs);
    return op;
  }
  if (watch.looks_for_nonfinite) {
    look_at_written(*op, inputs);
  }
  if (op->device >= 0) {
    const auto device = static_cast<DeviceType>(op->device);
    op->fast = at::autocast::get_autocast_dtype(device);
    op->override = engine.override(device);
    note_op_in_region(watch, op->device);
  }
  if (info->flops != nullptr && !watch.in_matmul) {
    op->formula = info->flops(inputs);
    op->is_matmul = watch.in_matmul = true;
  }
  watch.be_in(op.get());
  op->is_timed = watch.timing;
  if (op->is_timed) {
    op->began = std::chrono::steady_clock::now();
  }
  return op;
}

}  // namespace
