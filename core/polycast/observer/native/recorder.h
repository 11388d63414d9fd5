// An observation: who observes, on which threads, and what was counted.
//
// Owns the recorders' counts. A recorder has a table for each thread that it sees, which the thread fills.
//
// Locks. Recorders::mutex for who observes what; it is taken when that changes. A recorder has a mutex, which is taken before that of a
// table. None is held while the GIL is taken or a tensor is destroyed.

#pragma once

#include <ATen/record_function.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "observing.h"
#include "python.h"
#include "table.h"

namespace {

// What the engine does for the observer. Set by bind().
Engine engine;

enum class NonFinitePolicy : int8_t { kIgnore, kRecord, kRaise };
constexpr const char* kNonFinitePolicies[] = {"ignore", "record", "raise"};

// The first op that turned finite inputs into others.
struct FirstNonFinite {
  const OpInfo* op;
  int module;
  bool backward, inf, nan;
  ScalarType dtype;
  Object stack;
};

// Who observes, and on which threads.
class Recorders {
 public:
  static Recorders& running() {
    static auto* const only = new Recorders();
    return *only;
  }

  std::mutex mutex;
  std::vector<std::shared_ptr<Recorder>> recorders;

  static inline std::atomic<int> count{0};

  // Changes with the list, so that threads look at it again.
  static inline std::atomic<uint64_t> generation{1};
};

// One observation.
class Recorder {
 public:
  Recorder(bool all_threads, bool timing, int nonfinite, bool stacks)
      : all_threads(all_threads), timing(timing), stacks(stacks), nonfinite(static_cast<NonFinitePolicy>(nonfinite)) {}

  ~Recorder() {
    // It may die on a thread without the GIL, the last that had it in its list.
    engine.leave_behind(std::make_shared<std::tuple<decltype(overrides), decltype(python_stacks), decltype(first)>>(
        std::move(overrides), std::move(python_stacks), std::move(first)));
  }

  const bool all_threads, timing, stacks;
  const NonFinitePolicy nonfinite;
  const uint64_t thread_number = at::RecordFunction::currentThreadId();  // no other thread has it, later on either

  // The rest is guarded by the mutex, which is taken before that of a table.
  std::mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<Table>> tables;  // by torch's number of the thread
  Table of_ended_threads{this};
  std::unordered_map<const void*, Object> overrides;
  std::vector<Object> python_stacks;
  ska::flat_hash_map<const PyObject*, int> modules;
  std::unordered_map<const TensorImpl*, std::pair<c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>, int>>
      parameters;
  std::optional<FirstNonFinite> first;
  uint64_t nonfinite_count = 0;

  std::shared_ptr<Table> table_of(uint64_t thread_number) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& table = tables[thread_number];
    if (table == nullptr) {
      table = std::make_shared<Table>(this);
    }
    return table;
  }

  std::shared_ptr<Table> existing_table_of(uint64_t thread_number) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = tables.find(thread_number);
    if (found != tables.end()) {
      return found->second;
    }
    for (const auto& [number, table] : ended_) {
      if (number == thread_number) {
        return table;
      }
    }
    return nullptr;
  }

  // A thread ends. What it has counted is kept with what others have that ended; and for the last of them, which module made
  // their nodes, for whoever runs these backward.
  void end_thread(uint64_t thread_number) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = tables.find(thread_number);
    if (found == tables.end()) {
      return;
    }
    of_ended_threads.take_counts(*found->second);
    ended_.emplace_back(thread_number, std::move(found->second));
    tables.erase(found);
    if (ended_.size() > kMostEndedThreads) {
      ended_.pop_front();
    }
  }

  // Modules are known by address, until they die.
  void add_module(uintptr_t module, int number) {
    std::lock_guard<std::mutex> lock(mutex);
    modules[reinterpret_cast<const PyObject*>(module)] = number;
  }

  void forget_module(uintptr_t module) {
    std::lock_guard<std::mutex> lock(mutex);
    modules.erase(reinterpret_cast<const PyObject*>(module));
  }

  void add_parameter(const Tensor& parameter, int module) {
    std::lock_guard<std::mutex> lock(mutex);
    if (parameters.size() >= most_parameters_) {  // those that have died still keep a little memory
      for (auto each = parameters.begin(); each != parameters.end();) {
        each = each->second.first.expired() ? parameters.erase(each) : std::next(each);
      }
      most_parameters_ = std::max<size_t>(2 * parameters.size(), 1024);
    }
    parameters.try_emplace(
        parameter.unsafeGetTensorImpl(),
        c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>(parameter.getIntrusivePtr()), module);
  }

  uint64_t nonfinite_seen() {
    std::lock_guard<std::mutex> lock(mutex);
    return nonfinite_count;
  }

  int module_of(const PyObject* module) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = modules.find(module);
    return found == modules.end() ? kNoModule : found->second;
  }

  int module_of_parameter(const TensorImpl* parameter) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = parameters.find(parameter);
    return found == parameters.end() ? kNoModule : found->second.second;
  }

 private:
  static constexpr size_t kMostEndedThreads = 64;
  size_t most_parameters_ = 1024;
  std::deque<std::pair<uint64_t, std::shared_ptr<Table>>> ended_;
};

}  // namespace
