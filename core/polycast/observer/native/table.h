// What one thread counts for one recorder, in bounded memory.
//
// Locks. A table has a mutex, for its readers: its thread takes it once an op, and no other unless they read. It is not held while
// the GIL is taken or a tensor is destroyed.

#pragma once

#include <ATen/SequenceNumber.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "counts.h"

namespace {

class Recorder;

// What one thread counts for one recorder, or what threads that have ended have counted.
class Table {
 public:
  explicit Table(Recorder* recorder) : recorder(recorder) {}

  Recorder* const recorder;  // valid while it runs
  const uint64_t serial = next_serial++;  // no other table has it, later on either
  std::mutex mutex;
  ska::flat_hash_map<Where, std::unique_ptr<Counts>, WhereHash> counts;
  std::unordered_map<int, uint64_t> entries;  // by module, how often it was called
  std::map<Chain, ChainCounts> chains;
  std::map<Matmul, MatmulCounts> matmuls;
  std::map<RegionKey, RegionCounts> regions;
  std::map<std::pair<std::string, int>, uint64_t> compiled;

  // The module that an op belongs to now.
  int module() const {
    if (in_node_) {
      return modules_.size() > modules_before_node_ ? modules_.back() : node_module_;
    }
    return modules_.empty() ? kNoModule : modules_.back();
  }

  void enter_module(int module) {
    modules_.push_back(module);
    note_transition();
    std::lock_guard<std::mutex> lock(mutex);
    ++entries[module];
  }

  // Leave a module, and those inside it that were not left.
  void leave_module(int module) {
    const auto found = std::find(modules_.rbegin(), modules_.rend(), module);
    if (found != modules_.rend()) {
      modules_.erase(found.base() - 1, modules_.end());
      note_transition();
    }
  }

  // The module that made an autograd node, told by the node's number.
  int module_at(uint64_t sequence_number) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = std::upper_bound(
        transitions_.begin(), transitions_.end(), sequence_number, [](uint64_t number, const Transition& transition) {
          return number < transition.first;
        });
    return found == transitions_.begin() ? kNoModule : (--found)->second;
  }

  bool in_node() const { return in_node_; }

  // Take the counts of another, and leave it none. Called with neither locked.
  void take_counts(Table& other) {
    const std::scoped_lock lock(mutex, other.mutex);
    for (auto& [where, theirs] : other.counts) {
      auto& ours = counts[where];
      if (ours == nullptr) {
        ours = std::move(theirs);
      } else {
        ours->add(*theirs);
      }
    }
    const auto add = [](auto& ours, auto& theirs) {
      for (const auto& [key, number] : theirs) {
        if constexpr (std::is_same_v<std::decay_t<decltype(number)>, uint64_t>) {
          ours[key] += number;
        } else {
          ours[key].add(number);
        }
      }
      theirs.clear();
    };
    other.counts.clear();
    add(entries, other.entries);
    add(chains, other.chains);
    add(matmuls, other.matmuls);
    add(regions, other.regions);
    add(compiled, other.compiled);
  }

  struct Node {
    bool in_node;
    int module;
    size_t modules_before;
  };

  // Ops are of the backward pass, and of this module, until the node is left.
  Node enter_node(int module) {
    const Node before{in_node_, node_module_, modules_before_node_};
    in_node_ = true;
    node_module_ = module;
    modules_before_node_ = modules_.size();
    return before;
  }

  void leave_node(const Node& before) {
    in_node_ = before.in_node;
    node_module_ = before.module;
    modules_before_node_ = before.modules_before;
  }

 private:
  static inline std::atomic<uint64_t> next_serial{0};

  using Transition = std::pair<uint64_t, int>;  // nodes from this number on are made by this module
  static constexpr size_t kMostTransitions = 1 << 16;

  void note_transition() {
    const uint64_t number = at::sequence_number::peek();
    const int module = modules_.empty() ? kNoModule : modules_.back();
    std::lock_guard<std::mutex> lock(mutex);
    if (!transitions_.empty() && transitions_.back().first == number) {
      transitions_.back().second = module;
      return;
    }
    if (transitions_.size() == kMostTransitions) {  // whoever is still to run backward from there is in no module
      transitions_.pop_front();
    }
    transitions_.emplace_back(number, module);
  }

  std::vector<int> modules_;
  std::deque<Transition> transitions_;
  bool in_node_ = false;
  int node_module_ = kNoModule;
  size_t modules_before_node_ = 0;
};

}  // namespace
