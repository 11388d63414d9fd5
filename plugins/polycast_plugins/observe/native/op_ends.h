// Record the end of an op: its outputs, inf and nan among them, and the counts.
//
// Locks: a ThreadRecord's and a recorder's. The GIL is taken to keep a stack, to hold an override that was not seen before, and as in nonfinite.h,
// with no lock held.

#pragma once

#include "calls_to_python.h"
#include "numerics.h"
#include "python.h"
#include "values.h"
#include "thread_state.h"

namespace {

// The Python function. Set by bind(); it lives as long as the process.
PyObject* call_stack = nullptr;

// Return the program's stack. Called with the GIL held.
Object python_stack() {
  Object stack = call_from_callback(call_stack, nullptr);
  return stack ? stack : Object::borrow(Py_None);
}

// Hold an override, so that its address stays its own.
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
  Object held = Object::steal(found);
  std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.overrides.emplace(override, std::move(held));
}

// A call of an op that has ended.
struct Call {
  const ObservedOp& op;
  const DtypeCounts& outputs;
  ScalarType computes;
  double seconds;

  CallKey key(const ThreadRecord& record) const {
    return {
        .op = op.op, .override = op.override, .outcome = op.outcome, .module = record.module(), .device = op.device, .fast = op.fast,
        .backward = op.backward};
  }

  // Called with the record locked.
  void add_to(CallCounts& counts, ThreadRecord& record, int module) const {
    ++counts.calls;
    counts.inner_calls += op.inner;
    counts.flops += op.flops;
    for (const MatmulRows& each : op.rows) {
      counts.add_rows(each);
    }
    counts.inputs.add(op.inputs);
    counts.outputs.add(outputs);
    if (computes != ScalarType::Undefined) {
      counts.computes.add({computes});
    }
    if (op.is_timed && !op.inner) {
      counts.seconds.add({computes, seconds});
    }
    counts.casts.add(op.casts);
    for (const EndedChain& ended : op.chains) {
      Chain chain = ended.chain;
      chain.module = ended.modules ? ended.modules->of(record) : module;
      chain.consumer = ended.modules ? module : kNoModule;
      record.totals.chains[chain].add(ended.counts);
    }
    if (op.device >= 0 && op.has_new_output) {
      for (const Input& input : op.sources) {
        SourceCounts source = input.source;
        source.module = input.modules.of(record);
        counts.add_source(source);
      }
    }
  }
};

// Count a call if there is an entry with its key; return whether there is.
bool add_to_known(ThreadRecord& record, const Call& call) {
  const CallKey key = call.key(record);
  std::lock_guard<std::mutex> lock(record.mutex);
  const auto found = record.totals.ops.find(key);
  if (found == record.totals.ops.end()) {
    return false;
  }
  call.add_to(*found->second, record, key.module);
  return true;
}

// Count the first call with a key. Python may run: the caller holds the record and its recorder.
void add_first(ThreadRecord& record, const Call& call) {
  const CallKey key = call.key(record);
  auto counts = std::make_unique<CallCounts>();
  if (record.recorder->stacks) {
    const Gil gil;
    Object stack = python_stack();
    std::lock_guard<std::mutex> of_recorder(record.recorder->mutex);
    record.recorder->python_stacks.push_back(std::move(stack));
    counts->stack = record.recorder->python_stacks.size();
  }
  if (key.override != nullptr) {
    hold_override(*record.recorder, key.override, static_cast<DeviceType>(key.device));
  }
  std::lock_guard<std::mutex> lock(record.mutex);
  call.add_to(*record.totals.ops.emplace(key, std::move(counts)).first->second, record, key.module);
}

void add_counts(const ThreadState& state, const Call& call) {
  size_t known = 0;
  while (known < state.records.size() && add_to_known(*state.records[known], call)) {
    ++known;
  }
  if (known == state.records.size()) {
    return;
  }
  const auto records = state.records;
  const auto recorders = state.recorders, inherited = state.inherited;  // which the records refer to
  for (; known < records.size(); ++known) {
    if (!add_to_known(*records[known], call)) {
      add_first(*records[known], call);
    }
  }
}

// Record that an op turned finite inputs into inf or nan. Python may run.
void note_nonfinite(const ObservedOp& op, const Tensor& output) {
  const auto [inf, nan] = inf_and_nan(output);
  const auto records = op.state->records;
  const auto recorders = op.state->recorders, inherited = op.state->inherited;  // which the records refer to
  for (const auto& record : records) {
    Recorder& recorder = *record->recorder;
    if (recorder.nonfinite == NonFinitePolicy::kIgnore) {
      continue;
    }
    {
      std::lock_guard<std::mutex> lock(recorder.mutex);
      if (recorder.nonfinite_count++ != 0) {
        continue;
      }
    }
    const Gil gil;
    FirstNonFinite first{
        .op = op.op, .module = record->module(), .backward = op.backward, .inf = inf, .nan = nan, .dtype = output.scalar_type(),
        .stack = python_stack()};
    std::lock_guard<std::mutex> lock(recorder.mutex);
    recorder.first = std::move(first);
  }
}

// Check the outputs, or what an op without outputs has written, and if one is not finite, the inputs.
void check_outputs(const ObservedOp& op, c10::ArrayRef<c10::IValue> outputs) {
  bool done = !op.inputs_were_finite || op.op->has_uninitialized_output;
  const auto check = [&](const Tensor& tensor) {
    if (done || is_input(op, tensor) || is_finite(tensor)) {
      return;
    }
    done = true;
    if (std::all_of(op.unchecked.begin(), op.unchecked.end(), is_finite)) {
      note_nonfinite(op, tensor);
    }
  };
  for (const c10::IValue& output : outputs) {
    each_tensor(output, check);
  }
  std::for_each(op.changed.begin(), op.changed.end(), check);
}

// Return the last `count` outputs of an event. A boxed call may have other values below them on its stack.
c10::ArrayRef<c10::IValue> outputs_of(const at::RecordFunction& event, size_t count) {
  const c10::ArrayRef<c10::IValue> outputs = event.outputs();
  return outputs.size() > count ? outputs.slice(outputs.size() - count) : outputs;
}

// Add the operations of a matmul to an op: itself, or one that it is part of.
void add_matmul(ObservedOp& op, const Flops& formula, c10::ArrayRef<c10::IValue> outputs) {
  const bool returns_tensor = !outputs.empty() && outputs.front().isTensor() && outputs.front().toTensor().defined() &&
      has_known_sizes(outputs.front().toTensor());
  const double elements = returns_tensor ? static_cast<double>(outputs.front().toTensor().numel()) : 0;
  const double flops = formula.fixed + formula.per_output * elements, rows = formula.rows + formula.rows_per_output * elements;
  op.flops += flops;
  if (formula.kind != nullptr && rows > 0 && flops > 0) {
    op.rows.add(MatmulRows{formula.kind, static_cast<int64_t>(rows + 0.5), 1, flops});
  }
}

void end_inner_matmul(InnerMatmul& part, const at::RecordFunction& event) {
  part.outer->state->in_matmul = false;
  add_matmul(*part.outer, part.formula, outputs_of(event, 1));
}

// Find the chains that an op ends with its first floating-point output.
void find_chains(ObservedOp& op, const Tensor& output) {
  const ScalarType computes = output.scalar_type();
  const auto add = [&](ChainKind kind, ScalarType dtype) {
    const Chain chain{.kind = kind, .ops = {op.op}, .override = op.override, .device = op.device, .fast = dtype};
    op.chains.push_back({chain, {.count = 1, .bytes = bytes_of(output)}, std::nullopt});
  };
  if (op.op->is_loss && is_fast(computes)) {
    add(ChainKind::kLoss, computes);
  }
  if (computes == at::kFloat && op.float32_inputs == 1 && op.fast_inputs > 0 && op.op->written.empty() && !op.cast_inside) {
    add(ChainKind::kFloat32ByOneInput, op.fast);
  }
}

// Remember which op made an output, for the ops that take it.
void set_producer(ObservedOp& op, const Tensor& output, ScalarType computes) {
  ThreadState& state = *op.state;
  const auto asked_from = [&output](const Producer& producer) {
    return producer.computes == ScalarType::Undefined ? output.scalar_type() : producer.computes;
  };
  if (is_input(op, output)) {
    if (op.op->converts) {
      if (Producer* const converted = state.producers.find(output)) {
        converted->asked_from = asked_from(*converted);
      }
    }
    return;
  }
  Producer producer;
  if (op.copied) {
    producer = *op.copied;
    producer.asked_from = op.op->converts ? asked_from(producer) : producer.asked_from;
    producer.is_noted = false;
  } else {
    op.has_new_output = true;
    producer.op = op.op;
    for (const auto& record : state.records) {
      producer.modules.add(*record);
    }
    producer.override = op.override;
    producer.device = op.device;
    producer.computes = op.storages.empty() ? ScalarType::Undefined : computes;
    producer.cast_down = op.cast_down;
    producer.fast_before = computes == at::kFloat && op.casts.size() == 0 && !op.cast_inside ? op.fast_before : nullptr;
  }
  state.producers.set(output, std::move(producer));
}

void end_op(ObservedOp& op, const at::RecordFunction& event) {
  ThreadState& state = *op.state;
  const auto outputs = outputs_of(event, op.op->returns);
  if (op.only_checks) {
    state.checks_inner_op = false;
    check_outputs(op, outputs);
    return;
  }
  const double seconds = op.is_timed ? std::chrono::duration<double>(std::chrono::steady_clock::now() - op.began).count() : 0;
  state.set_op(op.outer);
  if (op.is_matmul) {
    state.in_matmul = false;
    add_matmul(op, op.formula, outputs);
  }
  DtypeCounts dtypes;
  const Tensor* first = nullptr;
  for (const c10::IValue& output : outputs) {
    each_tensor(output, [&](const Tensor& tensor) {
      if (tensor.is_floating_point()) {
        dtypes.add({tensor.scalar_type()});
        first = first == nullptr ? &tensor : first;
      }
    });
  }
  const ScalarType computes = first == nullptr ? op.widest : first->scalar_type();
  if (!op.backward) {
    if (op.device >= 0 && first != nullptr) {
      find_chains(op, *first);
    }
    for (const c10::IValue& output : outputs) {
      each_tensor(output, [&](const Tensor& tensor) {
        if (tensor.is_floating_point() && tensor.has_storage()) {
          set_producer(op, tensor, computes);
        }
      });
    }
  }
  if (state.looks_for_nonfinite && op.checks) {
    check_outputs(op, outputs);
  }
  if (op.numerics != nullptr) {
    count_outputs(op, outputs);
    add_numerics(op);
  }
  add_counts(state, Call{op, dtypes, computes, seconds});
}

}  // namespace
