// The counts of one thread for one recorder, in bounded memory.
//
// Locks: a mutex, which its thread takes for each op, and others only to read. It is not held while the GIL is taken or a tensor is
// destroyed.

#pragma once

#include <ATen/SequenceNumber.h>

#include <deque>

#include "counts.h"

namespace {

class Recorder;

class ThreadRecord {
 public:
  explicit ThreadRecord(Recorder* recorder) : recorder(recorder) {}

  Recorder* const recorder;               // valid while it runs
  const uint64_t serial = next_serial++;  // unique in the process
  std::mutex mutex;
  Totals totals;  // guarded by the mutex

  // The module to count an op for.
  int module() const {
    if (node_.active) {
      return modules_.size() > node_.modules_before ? modules_.back() : node_.module;
    }
    return modules_.empty() ? kNoModule : modules_.back();
  }

  void enter_module(int module) {
    modules_.push_back(module);
    note_transition();
    std::lock_guard<std::mutex> lock(mutex);
    ++totals.entries[module];
  }

  // Leave a module, and the modules inside it that were not left.
  void leave_module(int module) {
    const auto found = std::find(modules_.rbegin(), modules_.rend(), module);
    if (found != modules_.rend()) {
      modules_.erase(found.base() - 1, modules_.end());
      note_transition();
    }
  }

  // Return the module that made an autograd node, by the node's sequence number.
  int module_at(uint64_t sequence_number) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = std::upper_bound(
        transitions_.begin(), transitions_.end(), sequence_number,
        [](uint64_t number, const Transition& transition) { return number < transition.first; });
    return found == transitions_.begin() ? kNoModule : (--found)->second;
  }

  // An autograd node that runs on the thread.
  struct Node {
    bool active = false;
    int module = kNoModule;
    size_t modules_before = 0;
  };

  // Count ops in the backward pass and for a module, until the node is left. Returns what leave_node() takes.
  Node enter_node(int module) { return std::exchange(node_, Node{true, module, modules_.size()}); }
  void leave_node(const Node& before) { node_ = before; }
  bool in_node() const { return node_.active; }

 private:
  static inline std::atomic<uint64_t> next_serial{0};

  using Transition = std::pair<uint64_t, int>;  // nodes from this number on are made by this module
  static constexpr size_t kMaxTransitions = 1 << 16;

  void note_transition() {
    const uint64_t number = at::sequence_number::peek();
    const int module = modules_.empty() ? kNoModule : modules_.back();
    std::lock_guard<std::mutex> lock(mutex);
    if (!transitions_.empty() && transitions_.back().first == number) {
      transitions_.back().second = module;
      return;
    }
    if (transitions_.size() == kMaxTransitions) {  // nodes before it are counted for no module
      transitions_.pop_front();
    }
    transitions_.emplace_back(number, module);
  }

  std::vector<int> modules_;  // those that the thread is in
  std::deque<Transition> transitions_;
  Node node_;
};

}  // namespace
