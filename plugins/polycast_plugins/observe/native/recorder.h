// An observation: which threads it sees, and its counts.
//
// Owns the counts: a recorder has a record for each thread that it sees, which the thread fills.
//
// Locks: Recorders::mutex, for the list of recorders. A recorder's mutex, which is taken before those of its records. None is held while
// the GIL is taken or a tensor is destroyed.

#pragma once

#include <deque>
#include <tuple>

#include "observing.h"
#include "python.h"
#include "thread_record.h"

namespace {

// The functions of the engine. Set by bind().
Engine engine;

enum class NonFinitePolicy : int8_t { kIgnore, kRecord, kRaise };
constexpr const char* kNonFinitePolicies[] = {"ignore", "record", "raise"};

// The first op that turned finite inputs into inf or nan.
struct FirstNonFinite {
  const OpInfo* op;
  int module;
  bool backward, inf, nan;
  ScalarType dtype;
  Object stack;
};

// The recorders that run.
struct Recorders {
  static Recorders& running() {
    static auto* const only = new Recorders();
    return *only;
  }

  std::mutex mutex;
  std::vector<std::shared_ptr<Recorder>> recorders;

  static inline std::atomic<int> count{0}, of_all_threads{0};
  static inline std::atomic<uint64_t> generation{1};  // changes with the list
};

uint64_t this_thread() { return at::RecordFunction::currentThreadId(); }  // unique, also after the thread has ended

class Recorder {
 public:
  Recorder(bool all_threads, bool timing, int nonfinite, bool stacks, bool numerics)
      : all_threads(all_threads), timing(timing), stacks(stacks), numerics(numerics), nonfinite(static_cast<NonFinitePolicy>(nonfinite)) {}

  ~Recorder() {
    // This thread may be without the GIL: the last one that had the recorder in its list.
    engine.defer_destruction(std::make_shared<std::tuple<decltype(overrides), decltype(python_stacks), decltype(first)>>(
        std::move(overrides), std::move(python_stacks), std::move(first)));
  }

  const bool all_threads, timing, stacks, numerics;
  const NonFinitePolicy nonfinite;
  const uint64_t thread = this_thread();

  // The mutex guards the rest.
  std::mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<ThreadRecord>> records;  // by thread
  ThreadRecord of_ended_threads{this};
  std::unordered_map<const void*, Object> overrides;
  std::vector<Object> python_stacks;
  ska::flat_hash_map<const PyObject*, int> modules;
  std::unordered_map<const TensorImpl*, std::pair<c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>, int>>
      parameters;
  std::optional<FirstNonFinite> first;
  uint64_t nonfinite_count = 0;

  // Return the record of this thread.
  std::shared_ptr<ThreadRecord> record() {
    std::lock_guard<std::mutex> lock(mutex);
    auto& record = records[this_thread()];
    if (record == nullptr) {
      record = std::make_shared<ThreadRecord>(this);
    }
    return record;
  }

  // Return the record of another thread, or null.
  std::shared_ptr<ThreadRecord> record_of(uint64_t thread) {
    std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = records.find(thread); found != records.end()) {
      return found->second;
    }
    const auto ended = std::find_if(ended_.begin(), ended_.end(), [thread](const auto& each) { return each.first == thread; });
    return ended == ended_.end() ? nullptr : ended->second;
  }

  // Called as this thread ends. Its counts are added to those of other ended threads. The last records are kept, because other
  // threads may run autograd nodes that the thread has made.
  void end_thread() {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = records.find(this_thread());
    if (found == records.end()) {
      return;
    }
    {
      const std::scoped_lock both(of_ended_threads.mutex, found->second->mutex);
      of_ended_threads.totals.add(found->second->totals);
      found->second->totals = Totals();
    }
    ended_.emplace_back(this_thread(), std::move(found->second));
    records.erase(found);
    if (ended_.size() > kMaxEndedThreads) {
      ended_.pop_front();
    }
  }

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
    if (parameters.size() >= max_parameters_) {  // freed parameters still take a little memory
      for (auto each = parameters.begin(); each != parameters.end();) {
        each = each->second.first.expired() ? parameters.erase(each) : std::next(each);
      }
      max_parameters_ = std::max<size_t>(2 * parameters.size(), 1024);
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
  static constexpr size_t kMaxEndedThreads = 64;
  size_t max_parameters_ = 1024;
  std::deque<std::pair<uint64_t, std::shared_ptr<ThreadRecord>>> ended_;
};

}  // namespace
