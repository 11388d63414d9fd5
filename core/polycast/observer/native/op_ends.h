// What is made of an op once it has run: what it returned, what of it is not finite, and the counts.
//
// Owns nothing. Locks: a table's and a recorder's. The GIL is taken where a stack is kept or a region's override is seen for the first time,
// with no lock held.

#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "nonfinite.h"
#include "python.h"
#include "values.h"
#include "watch.h"

namespace {

// Set by bind(); it lives as long as the process.
PyObject* call_stack = nullptr;

// Called with the GIL held. What a signal's handler raises meanwhile is the program's, and is raised once torch is done:
// it lets no callback raise.
Object python_stack() {
  const ErrorAside of_the_op;  // which may have raised
  if (PyObject* const stack = PyObject_CallNoArgs(call_stack)) {
    return Object::made(stack);
  }
  const auto raise_it = [](void* value) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(static_cast<PyObject*>(value))), static_cast<PyObject*>(value));
    Py_DECREF(static_cast<PyObject*>(value));
    return -1;
  };
  PyObject *type, *raised, *traceback;
  PyErr_Fetch(&type, &raised, &traceback);
  PyErr_NormalizeException(&type, &raised, &traceback);
  if (traceback != nullptr) {
    PyException_SetTraceback(raised, traceback);
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  if (Py_AddPendingCall(raise_it, raised) != 0) {
    Py_DECREF(raised);
  }
  return Object::of(Py_None);
}

// Have the recorder hold an override that counts are told apart by.
void hold_override(Recorder& recorder, const void* override, DeviceType device) {
  {
    std::lock_guard<std::mutex> lock(recorder.mutex);
    if (recorder.overrides.count(override) != 0) {
      return;
    }
  }
  const Gil gil;
  PyObject* const found = engine.hold_override(device, override);
  if (found == nullptr) {
    return;
  }
  Object held = Object::made(found);
  std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.overrides.emplace(override, std::move(held));
}

// What a call of an op adds to the counts.
struct Call {
  const ObservedOp& op;
  const DtypeCounts& outputs;
  ScalarType computes;
  double seconds;

  Where where(const Table& table) const { return {op.op, op.override, table.module(), op.device, op.fast, op.backward}; }

  // Called with the table locked.
  void add_to(Table& table, Counts& counts, int module) const {
    ++counts.calls;
    counts.inner_calls += op.inner;
    counts.inputs.add(op.inputs);
    counts.outputs.add(outputs);
    if (computes != ScalarType::Undefined) {
      counts.computes.add(computes);
    }
    if (op.is_timed && !op.inner) {
      counts.seconds.add(computes, seconds);
    }
    for (const CastCounts& casts : op.casts) {
      counts.casts.add(casts);
    }
    if (op.flops > 0) {
      table.matmuls[{op.op, op.override, op.outcome, module, op.device, op.fast, op.backward}].add({1, op.flops});
    }
    for (const EndedChain& ended : op.chains) {
      Chain here = ended.chain;
      here.module = ended.modules ? ended.modules->of(table) : module;
      here.consumer = ended.modules ? module : kNoModule;
      table.chains[here].add(ended.counts);
    }
    if (op.device >= 0 && op.makes) {
      for (const Given& given : op.given) {
        SourceCounts source = given.source;
        source.module = given.modules.of(table);
        counts.sources.add(source);
      }
    }
  }
};

// Count a call where others like it have been counted; return whether there were any.
bool add_to_known(Table& table, const Call& call) {
  const Where where = call.where(table);
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto found = table.counts.find(where);
  if (found == table.counts.end()) {
    return false;
  }
  call.add_to(table, *found->second, where.module);
  return true;
}

// Count the first call of its kind. Python may run: called with a table that stays, as does its recorder.
void add_first(Table& table, const Call& call) {
  const Where where = call.where(table);
  auto fresh = std::make_unique<Counts>();
  if (table.recorder->stacks) {
    const Gil gil;
    Object stack = python_stack();
    std::lock_guard<std::mutex> of_recorder(table.recorder->mutex);
    table.recorder->python_stacks.push_back(std::move(stack));
    fresh->stack = table.recorder->python_stacks.size();
  }
  if (where.override != nullptr) {
    hold_override(*table.recorder, where.override, static_cast<DeviceType>(where.device));
  }
  std::lock_guard<std::mutex> lock(table.mutex);
  call.add_to(table, *table.counts.emplace(where, std::move(fresh)).first->second, where.module);
}

void add_counts(const Watch& watch, const Call& call) {
  size_t known = 0;
  while (known < watch.tables.size() && add_to_known(*watch.tables[known], call)) {
    ++known;
  }
  if (known == watch.tables.size()) {
    return;
  }
  const auto tables = watch.tables;
  const auto recorders = watch.recorders, lent = watch.lent;  // which the tables refer to
  for (; known < tables.size(); ++known) {
    if (!add_to_known(*tables[known], call)) {
      add_first(*tables[known], call);
    }
  }
}

// Note that an op returned inf or nan where its inputs had none. Python may run.
void note_nonfinite(const ObservedOp& op, const Tensor& output) {
  const auto [inf, nan] = inf_and_nan(output);
  const auto tables = op.watch->tables;
  const auto recorders = op.watch->recorders, lent = op.watch->lent;
  for (const auto& table : tables) {
    Recorder& recorder = *table->recorder;
    if (recorder.nonfinite == NonFinitePolicy::kIgnore) {
      continue;
    }
    bool is_first;
    {
      std::lock_guard<std::mutex> lock(recorder.mutex);
      is_first = recorder.nonfinite_count++ == 0;
    }
    if (is_first) {
      const Gil gil;
      FirstNonFinite first{op.op, table->module(), op.backward, inf, nan, output.scalar_type(), python_stack()};
      std::lock_guard<std::mutex> lock(recorder.mutex);
      recorder.first = std::move(first);
    }
  }
}

// Look at what an op returned: is it finite, if what it was given is?
void look_at_outputs(const ObservedOp& op, c10::ArrayRef<c10::IValue> outputs) {
  bool noted = !op.inputs_were_finite || !op.op->makes_nothing_up;
  for (const c10::IValue& output : outputs) {
    each_tensor(output, [&](const Tensor& tensor) {
      const bool is_view = op.op->written.empty() && tensor.has_storage() &&
          std::find(op.storages.begin(), op.storages.end(), storage_of(tensor)) != op.storages.end();
      if (noted || is_view || is_finite(tensor)) {
        return;
      }
      noted = true;
      if (std::all_of(op.tensors.begin(), op.tensors.end(), is_finite)) {
        note_nonfinite(op, tensor);
      }
    });
  }
}

// Without what a boxed call has below them on its stack.
c10::ArrayRef<c10::IValue> outputs_of(const ObservedOp& op, const at::RecordFunction& event) {
  const c10::ArrayRef<c10::IValue> outputs = event.outputs();
  return outputs.size() > op.op->returns ? outputs.slice(outputs.size() - op.op->returns) : outputs;
}

double flops_of(const Flops& formula, c10::ArrayRef<c10::IValue> outputs) {
  const bool returns_tensor = !outputs.empty() && outputs.front().isTensor() && outputs.front().toTensor().defined() &&
      has_known_sizes(outputs.front().toTensor());
  return formula.fixed + (returns_tensor ? formula.per_output * static_cast<double>(outputs.front().toTensor().numel()) : 0);
}

void end_part(ObservedPart& part, const at::RecordFunction& event) {
  part.outer->watch->in_matmul = false;
  const auto& outputs = event.outputs();  // of an op with one
  part.outer->flops += flops_of(part.formula, outputs.empty() ? outputs : c10::ArrayRef<c10::IValue>(outputs).slice(outputs.size() - 1));
}

// What a tensor was computed in, of which the program asks for the dtype that it has.
ScalarType asked_from(const Producer& producer, const Tensor& tensor) {
  return producer.computes == ScalarType::Undefined ? tensor.scalar_type() : producer.computes;
}

void end_op(ObservedOp& op, const at::RecordFunction& event) {
  using Clock = std::chrono::steady_clock;
  Watch& watch = *op.watch;
  if (op.only_looks) {
    watch.looking = false;
    look_at_outputs(op, outputs_of(op, event));
    return;
  }
  const double seconds = op.is_timed ? std::chrono::duration<double>(Clock::now() - op.began).count() : 0;
  watch.be_in(op.outer);
  const auto outputs = outputs_of(op, event);
  if (op.is_matmul) {
    watch.in_matmul = false;
    op.flops = flops_of(op.formula, outputs);
  }
  DtypeCounts dtypes;
  ScalarType computes = ScalarType::Undefined;
  const Tensor* first = nullptr;
  for (const c10::IValue& output : outputs) {
    each_tensor(output, [&](const Tensor& tensor) {
      if (!tensor.is_floating_point()) {
        return;
      }
      dtypes.add(tensor.scalar_type());
      if (computes == ScalarType::Undefined) {
        computes = tensor.scalar_type();
        first = &tensor;
      }
    });
  }
  const bool returns_floats = computes != ScalarType::Undefined;
  if (!returns_floats) {
    computes = op.widest;
  }
  if (!op.backward && op.device >= 0 && returns_floats) {
    if (op.op->is_loss && is_fast(computes)) {
      op.chains.push_back({Chain{ChainKind::kLoss, {op.op}, op.override, kNoModule, op.device, computes},
                           {1, bytes_of(*first)}, std::nullopt});
    }
    if (computes == at::kFloat && op.float32_inputs == 1 && op.fast_inputs > 0 && op.op->written.empty()) {
      op.chains.push_back({Chain{ChainKind::kFloat32ByOneInput, {op.op}, op.override, kNoModule, op.device, op.fast},
                           {1, bytes_of(*first)}, std::nullopt});
    }
  }
  for (const c10::IValue& output : op.backward ? c10::ArrayRef<c10::IValue>() : outputs) {
    each_tensor(output, [&](const Tensor& tensor) {
      if (!tensor.is_floating_point() || !tensor.has_storage()) {
        return;
      }
      const bool is_inputs =
          std::find(op.storages.begin(), op.storages.end(), storage_of(tensor)) != op.storages.end();
      if (is_inputs && op.op->written.empty()) {  // a view
        if (op.op->converts) {
          if (Producer* const converted = watch.producers.find(tensor)) {
            converted->asked_from = asked_from(*converted, tensor);
          }
        }
        return;
      }
      Producer producer;
      if (op.copied) {
        producer = *op.copied;
        producer.asked_from = op.op->converts ? asked_from(producer, tensor) : producer.asked_from;
        producer.is_noted = false;
      } else {
        op.makes = true;
        producer.op = op.op;
        for (const auto& table : watch.tables) {
          producer.modules.add(*table);
        }
        producer.override = op.override;
        producer.device = op.device;
        producer.computes = op.storages.empty() ? ScalarType::Undefined : computes;
        producer.cast_down = op.cast_down;
        producer.fast_before = computes == at::kFloat && op.casts.empty() ? op.fast_before : nullptr;
      }
      watch.producers.set(tensor, std::move(producer));
    });
  }
  if (watch.looks_for_nonfinite && op.looks) {
    look_at_outputs(op, outputs);
  }
  add_counts(watch, Call{op, dtypes, computes, seconds});
}

}  // namespace
