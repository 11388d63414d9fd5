// Seeing what runs: the callbacks that torch calls around each op while somebody observes, and what they make of it.
//
// Owns nothing; the counts are tally.h's. Locks: a table's, for its thread's own counts. The GIL is taken where a stack is kept
// or a region's overlay is seen for the first time, with no lock held.

#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>

#include "autocast.h"
#include "nonfinite.h"
#include "python.h"
#include "regions.h"
#include "tally.h"

namespace {

// Set by bind(); it lives as long as the process.
PyObject* stack_now = nullptr;

// The ops that were seen so far, in any thread, and other names that chains hold.
class OpInfos {
 public:
  static OpInfos& all() {
    static auto* const only = new OpInfos();
    return *only;
  }

  // The op of an event, or null where it is another range.
  const OpInfo* of(const at::RecordFunction& event) {
    const auto schema = event.operator_schema();
    if (!schema) {
      return nullptr;
    }
    std::string name = c10::toString(schema->operator_name());
    std::lock_guard<std::mutex> lock(mutex_);
    auto& info = infos_[name];
    if (info == nullptr) {
      info = std::make_unique<OpInfo>();
      info->arguments = schema->arguments().size();
      info->returns = schema->returns().size();
      for (size_t i = 0; i < info->arguments; ++i) {
        const auto* const alias = schema->arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite()) {
          info->written.push_back(i);
          if (schema->arguments()[i].is_out()) {
            info->out.push_back(i);
          }
        }
      }
      const std::string base = schema->name();
      const auto has = [&base](const char* part) { return base.find(part) != std::string::npos; };
      info->makes_nothing_up = !has("empty") && !has("::resize") && !has("::set_");
      info->copies = base == "aten::to" || has("_to_copy") || has("::clone") || has("::contiguous");
      info->is_loss = has("_loss") || has("::binary_cross_entropy") || has("::kl_div");
      info->name = std::move(name);
    }
    return info.get();
  }

  const OpInfo* named(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& info = infos_[name];
    if (info == nullptr) {
      info = std::make_unique<OpInfo>();
      info->name = name;
    }
    return info.get();
  }

  std::mutex& mutex() { return mutex_; }

  // Changes where an op goes, and another may come by its name.
  static inline std::atomic<uint64_t> generation{0};

 private:
  class Gone final : public c10::OpRegistrationListener {
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle& op) override { all().forget(c10::toString(op.operator_name())); }
  };

  OpInfos() : told_(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Gone>())) {}

  void forget(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = infos_.find(name);
    if (found != infos_.end()) {
      gone_.push_back(std::move(found->second));  // there are counts of it
      infos_.erase(found);
      ++generation;
    }
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<OpInfo>> infos_;
  std::vector<std::unique_ptr<OpInfo>> gone_;
  c10::RegistrationHandleRAII told_;
};

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

// A device's own key, whose name that of its Autocast key ends with.
DispatchKey key_below(DispatchKey autocast) {
  return c10::parseDispatchKey(std::string(c10::toString(autocast)).substr(std::strlen("Autocast")));
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

template <class Each>
void each_tensor(const c10::IValue& value, const Each& each) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.defined()) {
      each(tensor);
    }
  } else if (value.isList()) {
    const auto items = value.toListRef();
    if (!items.empty() && (items.front().isTensor() || value.isOptionalTensorList())) {
      for (const c10::IValue& item : items) {
        if (item.isTensor() && item.toTensor().defined()) {
          each(item.toTensor());
        }
      }
    }
  }
}

bool is_fast(ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

// Seeing a thread's backward pass, whose ops belong to the modules that made its nodes.
struct ObservedNode final : Observed {
  ObservedNode() : Observed(true) {}

  Watch* watch = nullptr;
  Watch::Tables tables;
  c10::SmallVector<Table::Node, 2> before;
  size_t lent = 0;  // recorders
};

// Lend a thread of autograd's own the recorders of the thread that called backward, and made the node; return how many. torch
// takes the callbacks of that thread along.
size_t lend_recorders(Watch& watch, uint64_t made_on) {
  if (watch.callback || at::get_record_function_tls_().sorted_tls_callbacks_.empty()) {
    return 0;
  }
  size_t count = 0;
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    for (const auto& recorder : Recorders::running().recorders) {
      const bool has_it = std::find(watch.lent.begin(), watch.lent.end(), recorder) != watch.lent.end();
      if (!recorder->all_threads && recorder->thread_number == made_on && !has_it) {
        watch.lent.push_back(recorder);
        ++count;
      }
    }
  }
  if (count != 0) {
    watch.find_tables();
  }
  return count;
}

// The first node of a pass takes the gradient of what backward was called on: of a loss.
void look_at_root(Watch& watch, const torch::autograd::Node& node) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == watch.last_graph_task) {
    return;
  }
  watch.last_graph_task = task;
  if (node.num_inputs() != 1) {
    return;
  }
  const auto& of_gradient = node.input_metadata(0);
  const ScalarType dtype = c10::typeMetaToScalarType(of_gradient.options().dtype());
  if (!is_fast(dtype) || of_gradient.is_nested_tensor()) {
    return;
  }
  const auto sizes = of_gradient.shape_as_dim_vector();
  if (!std::all_of(sizes.begin(), sizes.end(), [](const c10::SymInt& size) { return size.maybe_as_int() == 1; })) {
    return;
  }
  for (const auto& table : watch.tables) {
    const Chain chain{ChainKind::kLossRoot, {OpInfos::all().named(node.name())}, nullptr, table->module(), -1, dtype};
    std::lock_guard<std::mutex> lock(table->mutex);
    table->chains[chain].add({1, c10::elementSize(dtype)});
  }
}

// A range of autograd's engine begins, in which it evaluates a node.
std::unique_ptr<at::ObserverContext> enter_node(Watch& watch) {
  const auto running = torch::autograd::get_current_node();
  if (!running) {
    return nullptr;
  }
  const uint64_t made_on = running->thread_id();
  size_t lent = 0;
  if (static_cast<size_t>(Recorders::count.load(std::memory_order_relaxed)) != watch.tables.size()) {
    lent = lend_recorders(watch, made_on);
  }
  if (watch.tables.empty()) {
    return nullptr;
  }
  auto node = std::make_unique<ObservedNode>();
  node->watch = &watch;
  node->lent = lent;
  const auto& its_class = *running;
  const auto* const accumulate = typeid(its_class) == typeid(torch::autograd::AccumulateGrad)
      ? static_cast<const torch::autograd::AccumulateGrad*>(running.get())
      : nullptr;
  for (const auto& table : watch.tables) {
    int module = kNoModule;
    if (accumulate != nullptr) {
      module = table->recorder->module_of_parameter(accumulate->variable.unsafeGetTensorImpl());
    } else {
      const auto made_in = made_on == at::RecordFunction::currentThreadId()
          ? table
          : table->recorder->existing_table_of(made_on);
      module = made_in == nullptr ? kNoModule : made_in->module_at(running->sequence_nr());
    }
    node->before.push_back(table->enter_node(module));
    node->tables.push_back(table);
  }
  look_at_root(watch, *running);
  return node;
}

void leave_node(ObservedNode& node) {
  for (size_t i = 0; i < node.tables.size(); ++i) {
    node.tables[i]->leave_node(node.before[i]);
  }
  if (node.lent != 0) {
    auto& lent = node.watch->lent;
    lent.resize(lent.size() - node.lent);
    node.watch->find_tables();
  }
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
    if (const Producer* const producer = op.watch->producers.find(tensor)) {
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

std::unique_ptr<at::ObserverContext> start_op(Watch& watch, const at::RecordFunction& event) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  // Inside another op those count that autocast looks at. Those that run on what is in a wrapper are looked at, too.
  const bool in_wrapper = watch.op != nullptr && watch.looks_for_nonfinite && watch.op->is_wrapped && !watch.looking;
  if (watch.op != nullptr && keys.excluded_.has_all(c10::autocast_dispatch_keyset) && !in_wrapper) {
    return nullptr;
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
    }
    return nullptr;
  }
  auto op = std::make_unique<ObservedOp>();
  op->watch = &watch;
  op->op = info;
  op->outer = watch.op;
  op->inner = watch.op != nullptr;
  op->backward = watch.tables.front()->in_node();
  auto inputs = event.inputs();
  if (inputs.size() > info->arguments) {  // a whole stack
    inputs = inputs.slice(inputs.size() - info->arguments);
  }
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
      return nullptr;
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
    op->overlay = region_of(device).overlay;
    note_op_in_region(watch, op->device);
  }
  watch.op = observed_op = op.get();
  if (watch.timing) {
    op->began = std::chrono::steady_clock::now();
  }
  return op;
}

// Called with the GIL held. What a signal's handler raises meanwhile is the program's, and is raised once torch is done:
// it lets no callback raise.
Object python_stack() {
  const ErrorAside of_the_op;  // which may have raised
  if (PyObject* const stack = PyObject_CallNoArgs(stack_now)) {
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

// Have the recorder hold an overlay that counts are told apart by.
void hold_overlay(Recorder& recorder, const void* overlay, DeviceType device) {
  {
    std::lock_guard<std::mutex> lock(recorder.mutex);
    if (recorder.overlays.count(overlay) != 0) {
      return;
    }
  }
  const Frame* const frame = region_of(device).innermost;
  if (frame == nullptr || frame->policies.get() != overlay) {
    return;
  }
  const Gil gil;
  Object policies = Object::made(Holder<const Overlay>::make(frame->policies));
  Object held = Object::made(Py_BuildValue("(ON)", frame->overlay.get(), policies.release()));
  std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.overlays.emplace(overlay, std::move(held));
}

// What a call of an op adds to the counts.
struct Call {
  const ObservedOp& op;
  const DtypeCounts& outputs;
  ScalarType computes;
  double seconds;

  Where where(const Table& table) const { return {op.op, op.overlay, table.module(), op.device, op.fast, op.backward}; }

  // Called with the table locked.
  void add_to(Table& table, Counts& counts, int module) const {
    ++counts.calls;
    counts.inner_calls += op.inner;
    counts.inputs.add(op.inputs);
    counts.outputs.add(outputs);
    if (computes != ScalarType::Undefined) {
      counts.computes.add(computes);
    }
    if (op.watch->timing && !op.inner) {
      counts.add_seconds(computes, seconds);
    }
    for (const CastCounts& casts : op.casts) {
      counts.casts.add(casts);
    }
    for (const auto& [chain, bytes] : op.chains) {
      Chain here = chain;
      here.module = module;
      table.chains[here].add({1, bytes});
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
  if (where.overlay != nullptr) {
    hold_overlay(*table.recorder, where.overlay, static_cast<DeviceType>(where.device));
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

// Note what the cast of an activation says of the ops before.
void note_chain(ObservedOp& op, const Tensor& tensor, ScalarType target, uint64_t bytes) {
  const Producer* const producer = op.watch->producers.find(tensor);
  if (producer == nullptr) {
    return;
  }
  if (is_fast(target) && producer->computes == at::kFloat) {
    op.cast_down = true;
    if (producer->fast_before != nullptr) {
      op.chains.push_back(
          {Chain{ChainKind::kUnlistedFloat32, {producer->fast_before, producer->op, op.op}, producer->overlay, kNoModule,
                 producer->device, target},
           2 * bytes});
    }
  } else if (target == at::kFloat && producer->cast_down) {
    op.chains.push_back(
        {Chain{ChainKind::kRoundTrip, {producer->op, op.op}, op.overlay, kNoModule, op.device, tensor.scalar_type()}, bytes});
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

void end_op(ObservedOp& op, const at::RecordFunction& event) {
  using Clock = std::chrono::steady_clock;
  Watch& watch = *op.watch;
  if (op.only_looks) {
    watch.looking = false;
    look_at_outputs(op, outputs_of(op, event));
    return;
  }
  const double seconds = watch.timing ? std::chrono::duration<double>(Clock::now() - op.began).count() : 0;
  watch.op = observed_op = op.outer;
  const auto outputs = outputs_of(op, event);
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
      op.chains.push_back({Chain{ChainKind::kLoss, {op.op}, op.overlay, kNoModule, op.device, computes}, bytes_of(*first)});
    }
    if (computes == at::kFloat && op.float32_inputs == 1 && op.fast_inputs > 0 && op.op->written.empty()) {
      op.chains.push_back({Chain{ChainKind::kFloat32ByOneInput, {op.op}, op.overlay, kNoModule, op.device, op.fast}, bytes_of(*first)});
    }
  }
  for (const c10::IValue& output : op.backward ? c10::ArrayRef<c10::IValue>() : outputs) {
    each_tensor(output, [&](const Tensor& tensor) {
      if (!tensor.is_floating_point() || !tensor.has_storage()) {
        return;
      }
      const bool is_inputs =
          std::find(op.storages.begin(), op.storages.end(), storage_of(tensor)) != op.storages.end();
      if (is_inputs && op.op->written.empty()) {
        return;  // a view
      }
      Producer producer;
      if (op.copied) {
        producer = *op.copied;
      } else {
        producer.op = op.op;
        producer.overlay = op.overlay;
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

std::unique_ptr<at::ObserverContext> start_event(const at::RecordFunction& event) {
  Watch* const watch = refreshed_watch(true);
  if (watch == nullptr) {
    return nullptr;
  }
  constexpr const char* kNode = "autograd::engine::evaluate_function";
  if (event.name()[0] == 'a' && event.name()[2] == 't' && std::strncmp(event.name(), kNode, std::strlen(kNode)) == 0) {
    return enter_node(*watch);
  }
  return watch->tables.empty() ? nullptr : start_op(*watch, event);
}

// An observation may have been ended on another thread than its own.
void remove_callback_if_nobody_observes() {
  Watch* const watch = watch_of_thread;
  if (watch != nullptr && watch->callback &&
      std::all_of(watch->recorders.begin(), watch->recorders.end(), [](const auto& other) { return other->all_threads; })) {
    at::removeCallback(*watch->callback);
    watch->callback.reset();
  }
}

std::unique_ptr<at::ObserverContext> start_event_of_thread(const at::RecordFunction& event) {
  if (const Watch* const watch = refreshed_watch(true); watch != nullptr && watch->recorders.empty()) {
    remove_callback_if_nobody_observes();
  }
  return recorders_of_all.load(std::memory_order_relaxed) != 0 ? nullptr : start_event(event);
}

void end_event(const at::RecordFunction& event, at::ObserverContext* context) {
  if (context == nullptr) {
    return;
  }
  if (auto* const op = static_cast<Observed*>(context); op->is_node) {
    leave_node(*static_cast<ObservedNode*>(op));
  } else {
    end_op(*static_cast<ObservedOp*>(op), event);
  }
}

at::RecordFunctionCallback callback(at::RecordFunctionCallback::StartCallback start) {
  return at::RecordFunctionCallback(start, &end_event)
      .needsInputs(true)
      .needsOutputs(true)
      .scopes({at::RecordScope::FUNCTION});
}

at::CallbackHandle callback_of_all = 0;  // guarded by the mutex of Recorders

// Called with the GIL held.
void start_recorder(const std::shared_ptr<Recorder>& recorder) {
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    Recorders::running().recorders.push_back(recorder);
    ++Recorders::count;
    ++Recorders::generation;
    if (recorder->all_threads && recorders_of_all++ == 0) {
      callback_of_all = at::addGlobalCallback(callback(&start_event));
    }
  }
  Watch* const watch = refreshed_watch(true);
  if (!recorder->all_threads && watch != nullptr && !watch->callback) {
    watch->callback = at::addThreadLocalCallback(callback(&start_event_of_thread));
  }
}

// Called with the GIL held, on any thread.
void stop_recorder(const std::shared_ptr<Recorder>& recorder) {
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    auto& running = Recorders::running().recorders;
    const auto found = std::find(running.begin(), running.end(), recorder);
    if (found == running.end()) {
      return;
    }
    running.erase(found);
    --Recorders::count;
    ++Recorders::generation;
    if (recorder->all_threads && --recorders_of_all == 0) {
      at::removeCallback(callback_of_all);
    }
  }
  refreshed_watch(false);
  remove_callback_if_nobody_observes();
  LeftBehind::things().free();
}

// enter_module(module), leave_module(module): around what the module computes.
template <bool enters>
PyObject* pass_module(PyObject*, PyObject* module) {
  if (Watch* const watch = refreshed_watch(recorders_of_all.load(std::memory_order_relaxed) != 0)) {
    for (const auto& table : watch->tables) {
      const int number = table->recorder->module_of(module);
      if (number != kNoModule) {
        enters ? table->enter_module(number) : table->leave_module(number);
      }
    }
  }
  return Py_NewRef(Py_None);
}

// note_compiling(begins): what runs on this thread until the compiler is done is not the program's.
PyObject* note_compiling(PyObject*, PyObject* begins) {
  if (Watch* const watch = watch_of_thread) {
    watch->compiling = std::max(0, watch->compiling + (begins == Py_True ? 1 : -1));
  }
  return Py_NewRef(Py_None);
}

// note_overlay(overlay), for kernels in Python: the overlay that an op runs under.
PyObject* note_overlay(PyObject*, PyObject* overlay) {
  if (ObservedOp* const op = observed_op) {
    op->overlay = overlay;
    const Object held = Object::made(Py_BuildValue("(O)", overlay));  // before a lock: Python may run
    for (const auto& table : op->watch->tables) {
      std::lock_guard<std::mutex> lock(table->recorder->mutex);
      table->recorder->overlays.try_emplace(overlay, held);
    }
  }
  return Py_NewRef(Py_None);
}

void note_python_cast(
    const Tensor& tensor, const Tensor& cast, bool of_weight, std::optional<bool> found, double seconds) {
  if (observed_op == nullptr) {
    return;
  }
  ObservedOp& op = *observed_op;
  CastCounts counts{tensor.scalar_type(), cast.scalar_type(), of_weight};
  if (found.value_or(false)) {
    counts.hits = 1;
  } else {
    counts.count = 1;
    counts.bytes = bytes_of(cast);
    counts.misses = found.has_value();
    counts.seconds = op.watch->timing ? seconds : 0;
    if (of_weight && counts.target != at::kFloat && op.watch->note_cast(tensor, cast) != Watch::Last::kNone) {
      counts.recasts = 1;
      counts.recast_bytes = counts.bytes;
    }
  }
  op.casts.add(counts);
  if (!op.backward && !of_weight) {
    note_chain(op, tensor, counts.target, bytes_of(cast));
  }
}

// note_cast(tensor, cast, of_weight, found, seconds): a cast of a kernel in Python; `found` is None where nothing was looked for.
PyObject* note_cast(PyObject*, PyObject* arguments) {
  PyObject *tensor, *cast, *found;
  int of_weight;
  double seconds;
  parse(arguments, "OOpOd", &tensor, &cast, &of_weight, &found, &seconds);
  note_python_cast(
      tensor_of(tensor), tensor_of(cast), of_weight != 0, found == Py_None ? std::nullopt : std::optional(found == Py_True), seconds);
  return Py_NewRef(Py_None);
}

// note_entry(region, device_type, enabled, dtype), note_exit(region): of regions in Python, which have numbers.
PyObject* note_python_entry(PyObject*, PyObject* arguments) {
  unsigned long long region;
  PyObject *device_type, *dtype;
  int enabled;
  parse(arguments, "KOpO", &region, &device_type, &enabled, &dtype);
  note_entry(reinterpret_cast<const void*>(region), device_of(device_type), enabled != 0, dtype_of(dtype));
  return Py_NewRef(Py_None);
}

PyObject* note_python_exit(PyObject*, PyObject* region) {
  note_exit(reinterpret_cast<const void*>(PyLong_AsUnsignedLongLong(region)));
  return Py_NewRef(Py_None);
}

}  // namespace
