// Seeing a thread's backward pass, whose ops belong to the modules that made its nodes.
//
// Owns nothing. Locks: Recorders::mutex and a table's, one at a time.

#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "op_infos.h"
#include "values.h"
#include "watch.h"

namespace {

// A node that is being evaluated.
struct ObservedNode final : Observed {
  ObservedNode() : Observed(ObservedKind::kNode) {}

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

}  // namespace
