// Follows the backward pass: its ops are counted for the modules that made its nodes.
//
// Locks: Recorders::mutex and a ThreadRecord's, one at a time.

#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "op_infos.h"
#include "values.h"
#include "thread_state.h"

namespace {

// An autograd node that runs.
struct ObservedNode final : Observed {
  ObservedNode() : Observed(ObservedKind::kNode) {}

  ThreadState* state = nullptr;
  ThreadState::Records records;
  c10::SmallVector<ThreadRecord::Node, 2> before;  // of each record
  size_t inherited = 0;                     // recorders
  bool had_grad_mode = false;               // the node around it
};

// Give this thread, one of autograd's own, the recorders of the thread that made the node; return how many. torch copies that
// thread's callbacks to this one.
size_t inherit_recorders(ThreadState& state, uint64_t made_on) {
  if (state.callback || at::get_record_function_tls_().sorted_tls_callbacks_.empty()) {
    return 0;
  }
  size_t count = 0;
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    for (const auto& recorder : Recorders::running().recorders) {
      const bool has_it = std::find(state.inherited.begin(), state.inherited.end(), recorder) != state.inherited.end();
      if (!recorder->all_threads && recorder->thread == made_on && !has_it) {
        state.inherited.push_back(recorder);
        ++count;
      }
    }
  }
  if (count != 0) {
    state.find_records();
  }
  return count;
}

// Record whether a pass begins at a scalar in a fast dtype, which is a loss.
void find_loss_root(ThreadState& state, const torch::autograd::Node& node) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == state.last_graph_task) {
    return;
  }
  state.last_graph_task = task;
  if (node.num_inputs() != 1) {
    return;
  }
  const auto& gradient = node.input_metadata(0);
  const ScalarType dtype = c10::typeMetaToScalarType(gradient.options().dtype());
  if (!is_fast(dtype) || gradient.is_nested_tensor()) {
    return;
  }
  const auto sizes = gradient.shape_as_dim_vector();
  if (!std::all_of(sizes.begin(), sizes.end(), [](const c10::SymInt& size) { return size.maybe_as_int() == 1; })) {
    return;
  }
  for (const auto& record : state.records) {
    const Chain chain{
        .kind = ChainKind::kLossRoot, .ops = {OpInfos::all().named(node.name())}, .module = record->module(), .fast = dtype};
    std::lock_guard<std::mutex> lock(record->mutex);
    record->totals.chains[chain].add({1, c10::elementSize(dtype)});
  }
}

// Return the module that made a node: for the node that accumulates a gradient, the module of the parameter.
int module_of_node(const std::shared_ptr<ThreadRecord>& record, const torch::autograd::Node& node) {
  if (typeid(node) == typeid(torch::autograd::AccumulateGrad)) {
    const auto& accumulate = static_cast<const torch::autograd::AccumulateGrad&>(node);
    return record->recorder->module_of_parameter(accumulate.variable.unsafeGetTensorImpl());
  }
  const uint64_t made_on = const_cast<torch::autograd::Node&>(node).thread_id();
  const auto made_in = made_on == this_thread() ? record : record->recorder->record_of(made_on);
  return made_in == nullptr ? kNoModule : made_in->module_at(node.sequence_nr());
}

std::unique_ptr<at::ObserverContext> begin_node(ThreadState& state) {
  const auto running = torch::autograd::get_current_node();
  if (!running) {
    return nullptr;
  }
  size_t inherited = 0;
  if (static_cast<size_t>(Recorders::count.load(std::memory_order_relaxed)) != state.records.size()) {
    inherited = inherit_recorders(state, running->thread_id());
  }
  if (state.records.empty()) {
    return nullptr;
  }
  auto node = std::make_unique<ObservedNode>();
  node->state = &state;
  node->inherited = inherited;
  node->had_grad_mode = std::exchange(state.node_has_grad_mode, at::GradMode::is_enabled());
  for (const auto& record : state.records) {
    node->before.push_back(record->enter_node(module_of_node(record, *running)));
    node->records.push_back(record);
  }
  find_loss_root(state, *running);
  return node;
}

void end_node(ObservedNode& node) {
  node.state->node_has_grad_mode = node.had_grad_mode;
  for (size_t i = 0; i < node.records.size(); ++i) {
    node.records[i]->leave_node(node.before[i]);
  }
  if (node.inherited != 0) {
    auto& inherited = node.state->inherited;
    inherited.resize(inherited.size() - node.inherited);
    node.state->find_records();
  }
}

}  // namespace
