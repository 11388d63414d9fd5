// Seeing what runs: the callbacks that torch calls around each op while somebody observes, and what they make of it.
//
// Owns nothing; the counts are tally.h's. Locks: a table's, for its thread's own counts. The GIL is taken where a stack is kept
// or a region's overlay is seen for the first time, with no lock held.

#pragma once

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>

#include "nonfinite.h"
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

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<OpInfo>> infos_;
};

// The op of an event, or null where it is another range. It is told by the address of its name, and by the name.
const OpInfo* op_of(Watch& watch, const at::RecordFunction& event) {
  const char* const name = event.name();
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
    for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
      found[static_cast<size_t>(device)] = at::autocast::get_autocast_dispatch_key_from_device_type(device);
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
  c10::SmallVector<std::shared_ptr<Table>, 2> tables;
  c10::SmallVector<Table::Node, 2> before;
  std::vector<std::shared_ptr<Recorder>> recorders;
  bool borrowed = false;  // the tables are those of the thread that called backward
  bool timing_before, looks_before;
};

// A range of autograd's engine begins, in which it evaluates a node.
std::unique_ptr<at::ObserverContext> enter_node(Watch& watch) {
  const auto running = torch::autograd::get_current_node();
  if (!running) {
    return nullptr;
  }
  const uint64_t made_on = running->thread_id();
  auto node = std::make_unique<ObservedNode>();
  node->watch = &watch;
  node->timing_before = watch.timing;
  node->looks_before = watch.looks_for_nonfinite;
  if (watch.tables.empty()) {  // one of autograd's own threads
    {
      std::lock_guard<std::mutex> lock(Recorders::running().mutex);
      for (const auto& recorder : Recorders::running().recorders) {
        if (recorder->thread_number == made_on) {
          node->recorders.push_back(recorder);
        }
      }
    }
    for (const auto& recorder : node->recorders) {
      watch.tables.push_back(recorder->table_of(made_on));
      watch.timing |= recorder->timing;
      watch.looks_for_nonfinite |= recorder->nonfinite != NonFinitePolicy::kIgnore;
    }
    if (watch.tables.empty()) {
      return nullptr;
    }
    node->borrowed = true;
  }
  const auto* const accumulate = dynamic_cast<const torch::autograd::AccumulateGrad*>(running.get());
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
  return node;
}

// The first node of a pass has the gradient of what backward was called on.
void look_at_root(Watch& watch, const at::RecordFunction& event) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == watch.last_graph_task) {
    return;
  }
  watch.last_graph_task = task;
  const auto inputs = event.inputs();
  if (inputs.size() != 1 || !inputs[0].isTensor() || !inputs[0].toTensor().defined()) {
    return;
  }
  const Tensor& gradient = inputs[0].toTensor();
  if (gradient.numel() == 1 && is_fast(gradient.scalar_type())) {
    for (const auto& table : watch.tables) {
      const Chain chain{
          ChainKind::kLossRoot, {OpInfos::all().named(event.name())}, nullptr, table->module(), -1, gradient.scalar_type()};
      std::lock_guard<std::mutex> lock(table->mutex);
      ChainCounts& counts = table->chains[chain];
      ++counts.count;
      counts.bytes += gradient.nbytes();
    }
  }
}

void leave_node(ObservedNode& node) {
  for (size_t i = 0; i < node.tables.size(); ++i) {
    node.tables[i]->leave_node(node.before[i]);
  }
  if (node.borrowed) {
    node.watch->tables.clear();
    node.watch->timing = node.timing_before;
    node.watch->looks_for_nonfinite = node.looks_before;
  }
}

// What is traced does not run.
bool is_traced() {
  using Mode = c10::impl::TorchDispatchModeKey;
  using Modes = c10::impl::TorchDispatchModeTLS;
  return Modes::any_modes_set() &&
      (Modes::get_mode(Mode::FAKE) || Modes::get_mode(Mode::PROXY) || Modes::get_mode(Mode::FUNCTIONAL));
}

void look_at_input(ObservedOp& op, const Tensor& tensor, const c10::impl::LocalDispatchKeySet& keys, bool is_written) {
  if (op.device < 0) {
    const auto device = static_cast<size_t>(tensor.device().type());
    const DispatchKey key = autocast_keys()[device];
    if (key != DispatchKey::Undefined && !keys.excluded_.has(key)) {
      op.device = static_cast<int8_t>(device);
    }
  }
  if (!tensor.is_floating_point()) {
    return;
  }
  const ScalarType dtype = tensor.scalar_type();
  op.inputs.add(dtype);
  op.widest = op.widest == ScalarType::Undefined ? dtype : c10::promoteTypes(op.widest, dtype);
  if (tensor.dim() > 0) {
    op.fast_inputs += is_fast(dtype);
    op.float32_inputs += dtype == at::kFloat;
  }
  if (tensor.has_storage()) {
    op.storages.push_back(storage_of(tensor));
  }
  if (op.watch->looks_for_nonfinite) {
    op.tensors.push_back(tensor);
    if (is_written) {
      op.inputs_were_finite = op.inputs_were_finite && is_finite(tensor);
    }
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

std::unique_ptr<at::ObserverContext> start_op(Watch& watch, const at::RecordFunction& event) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  // Inside another op those count that autocast looks at.
  if (watch.op != nullptr && keys.excluded_.has_all(c10::autocast_dispatch_keyset)) {
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
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_written = !info->written.empty() &&
        std::find(info->written.begin(), info->written.end(), i) != info->written.end();
    each_tensor(inputs[i], [&](const Tensor& tensor) { look_at_input(*op, tensor, keys, is_written); });
    if (watch.looks_for_nonfinite && !is_finite_number(inputs[i])) {
      op->inputs_were_finite = false;
    }
  }
  if (watch.op != nullptr && (op->device < 0 || watch.op->op == info)) {
    if (watch.op->op == info && watch.op->device < 0) {  // a mode or a subclass calls it again
      watch.op->device = op->device;
      watch.op->fast = op->device < 0 ? watch.op->fast : at::autocast::get_autocast_dtype(static_cast<DeviceType>(op->device));
    }
    return nullptr;
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

// Called with the GIL held, or not.
py::object python_stack() {
  const py::gil_scoped_acquire gil;
  try {
    return py::handle(stack_now)();
  } catch (const py::error_already_set&) {
    return py::none();
  }
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
  const py::gil_scoped_acquire gil;
  py::object held = py::make_tuple(frame->overlay, py::cast(std::const_pointer_cast<Overlay>(frame->policies)));
  std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.overlays.emplace(overlay, std::move(held));
}

void add_counts(
    Table& table, const ObservedOp& op, const Where& where, const DtypeCounts& outputs, ScalarType computes, double seconds) {
  std::unique_lock<std::mutex> lock(table.mutex);
  auto found = table.counts.find(where);
  if (found == table.counts.end()) {
    lock.unlock();
    auto fresh = std::make_unique<Counts>();
    if (table.recorder->stacks) {
      py::object stack = python_stack();
      std::lock_guard<std::mutex> of_recorder(table.recorder->mutex);
      table.recorder->python_stacks.push_back(std::move(stack));
      fresh->stack = table.recorder->python_stacks.size();
    }
    if (where.overlay != nullptr) {
      hold_overlay(*table.recorder, where.overlay, static_cast<DeviceType>(where.device));
    }
    lock.lock();
    found = table.counts.emplace(where, std::move(fresh)).first;
  }
  Counts& counts = *found->second;
  ++counts.calls;
  counts.inner_calls += op.inner;
  counts.inputs.add(op.inputs);
  counts.outputs.add(outputs);
  if (computes != ScalarType::Undefined) {
    counts.computes.add(computes);
  }
  if (op.watch->timing && !op.inner) {
    const auto same =
        std::find_if(counts.seconds.begin(), counts.seconds.end(), [&](const auto& each) { return each.first == computes; });
    same == counts.seconds.end() ? counts.seconds.emplace_back(computes, seconds) : *same = {computes, same->second + seconds};
  }
  for (const CastCounts& casts : op.casts) {
    counts.casts.add(casts);
  }
  for (const auto& [chain, bytes] : op.chains) {
    Chain here = chain;
    here.module = where.module;
    ChainCounts& chains = table.chains[here];
    ++chains.count;
    chains.bytes += bytes;
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

// Note that an op returned inf or nan where its inputs had none.
void note_nonfinite(const ObservedOp& op, const Tensor& output) {
  bool inf, nan;
  {
    const Unobserved unobserved;
    inf = at::isinf(output).any().item<bool>();
    nan = at::isnan(output).any().item<bool>();
  }
  for (const auto& table : op.watch->tables) {
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
      FirstNonFinite first{op.op, table->module(), op.backward, inf, nan, output.scalar_type(), python_stack()};
      std::lock_guard<std::mutex> lock(recorder.mutex);
      recorder.first = std::move(first);
    }
  }
}

void end_op(ObservedOp& op, const at::RecordFunction& event) {
  using Clock = std::chrono::steady_clock;
  Watch& watch = *op.watch;
  const double seconds = watch.timing ? std::chrono::duration<double>(Clock::now() - op.began).count() : 0;
  watch.op = observed_op = op.outer;
  const auto& outputs = event.outputs();
  const size_t skipped = outputs.size() > op.op->returns ? outputs.size() - op.op->returns : 0;
  DtypeCounts dtypes;
  ScalarType computes = ScalarType::Undefined;
  uint64_t bytes = 0;
  bool noted = false;
  for (size_t i = skipped; i < outputs.size(); ++i) {
    each_tensor(outputs[i], [&](const Tensor& tensor) {
      if (!tensor.is_floating_point()) {
        return;
      }
      dtypes.add(tensor.scalar_type());
      if (computes == ScalarType::Undefined) {
        computes = tensor.scalar_type();
        bytes = tensor.nbytes();
      }
    });
  }
  const bool returns_floats = computes != ScalarType::Undefined;
  if (!returns_floats) {
    computes = op.widest;
  }
  if (!op.backward && op.device >= 0 && returns_floats) {
    if (op.op->is_loss && is_fast(computes)) {
      op.chains.push_back({Chain{ChainKind::kLoss, {op.op}, op.overlay, kNoModule, op.device, computes}, bytes});
    }
    if (computes == at::kFloat && op.float32_inputs == 1 && op.fast_inputs > 0 && op.op->written.empty()) {
      op.chains.push_back({Chain{ChainKind::kFloat32ByOneInput, {op.op}, op.overlay, kNoModule, op.device, op.fast}, bytes});
    }
  }
  for (size_t i = skipped; i < outputs.size(); ++i) {
    each_tensor(outputs[i], [&](const Tensor& tensor) {
      if (!tensor.is_floating_point() || !tensor.has_storage()) {
        return;
      }
      const bool is_inputs =
          std::find(op.storages.begin(), op.storages.end(), storage_of(tensor)) != op.storages.end();
      if (is_inputs && op.op->written.empty()) {
        return;  // a view
      }
      if (!op.backward) {
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
      }
      if (watch.looks_for_nonfinite && !noted && op.op->makes_nothing_up && op.inputs_were_finite && !is_finite(tensor)) {
        noted = true;
        const bool inputs_are_finite = std::all_of(op.tensors.begin(), op.tensors.end(), [&](const Tensor& input) {
          return storage_of(input) == storage_of(tensor) || is_finite(input);
        });
        if (inputs_are_finite) {
          note_nonfinite(op, tensor);
        }
      }
    });
  }
  for (const auto& table : watch.tables) {
    const Where where{op.op, op.overlay, table->module(), op.device, op.fast, op.backward};
    add_counts(*table, op, where, dtypes, computes, seconds);
  }
}

std::unique_ptr<at::ObserverContext> start_event(const at::RecordFunction& event) {
  Watch* const watch = refreshed_watch(true);
  if (watch == nullptr) {
    return nullptr;
  }
  if (event.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    look_at_root(*watch, event);
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
      .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
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
  HANDLE_TH_ERRORS
  if (Watch* const watch = refreshed_watch(recorders_of_all.load(std::memory_order_relaxed) != 0)) {
    for (const auto& table : watch->tables) {
      const int number = table->recorder->module_of(module);
      if (number != kNoModule) {
        enters ? table->enter_module(number) : table->leave_module(number);
      }
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// compiling(begins): what runs on this thread until the compiler is done is not the program's.
void note_compiling(bool begins) {
  if (Watch* const watch = watch_of_thread) {
    watch->compiling = std::max(0, watch->compiling + (begins ? 1 : -1));
  }
}

// For kernels in Python: the overlay that an op runs under, and a cast.
void note_overlay(const py::object& overlay) {
  ObservedOp* const op = observed_op;
  if (op == nullptr) {
    return;
  }
  op->overlay = overlay.ptr();
  const py::object held = py::make_tuple(overlay);  // before a lock: Python may run
  for (const auto& table : op->watch->tables) {
    std::lock_guard<std::mutex> lock(table->recorder->mutex);
    table->recorder->overlays.try_emplace(overlay.ptr(), held);
  }
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
    counts.bytes = cast.nbytes();
    counts.misses = found.has_value();
    counts.seconds = op.watch->timing ? seconds : 0;
    if (of_weight && counts.target != at::kFloat && op.watch->note_cast(tensor, cast) != Watch::Last::kNone) {
      counts.recasts = 1;
      counts.recast_bytes = counts.bytes;
    }
  }
  op.casts.add(counts);
  if (!op.backward && !of_weight) {
    note_chain(op, tensor, counts.target, cast.nbytes());
  }
}

}  // namespace
