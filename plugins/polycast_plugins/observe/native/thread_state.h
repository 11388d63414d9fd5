// The state of an observed thread: its observers, the op that it runs, and the last outputs of ops.
//
// Owns the state of each thread. Locks: Recorders::mutex, when the list of recorders has changed.

#pragma once

#include "version_stamp.h"
#include "observing.h"
#include "recorder.h"

namespace {

// The module in which an op ran, for each record.
class Modules {
 public:
  void add(const ThreadRecord& record) { modules_.emplace_back(record.serial, record.module()); }

  int of(const ThreadRecord& record) const {
    for (const auto& [serial, module] : modules_) {
      if (serial == record.serial) {
        return module;
      }
    }
    return kNoModule;
  }

 private:
  c10::SmallVector<std::pair<uint64_t, int>, 1> modules_;
};

// The op that made a tensor.
struct Producer {
  c10::weak_intrusive_ptr<StorageImpl> storage{c10::intrusive_ptr<StorageImpl>()};
  const OpInfo* op = nullptr;
  const OpInfo* fast_before = nullptr;  // if it computed in float32: the last op before it that computed in a fast dtype
  const void* override = nullptr;
  int8_t device = -1;
  ScalarType computes = ScalarType::Undefined;
  bool cast_down = false;                          // it cast a float32 activation of another op
  bool is_noted = false;                           // in a chain
  ScalarType asked_from = ScalarType::Undefined;  // see SourceCounts
  Modules modules;
};

// The producers of tensors, by storage. There are at most kMax; those of freed storages make room first.
class Producers {
 public:
  Producer* find(const Tensor& tensor) {
    if (!tensor.has_storage()) {
      return nullptr;
    }
    const auto found = by_storage_.find(storage_of(tensor));
    return found == by_storage_.end() ? nullptr : &found->second;
  }

  void set(const Tensor& tensor, Producer producer) {
    if (by_storage_.size() >= kMax) {
      for (auto each = by_storage_.begin(); each != by_storage_.end();) {
        each = each->second.storage.expired() ? by_storage_.erase(each) : std::next(each);
      }
      if (by_storage_.size() > kMax / 2) {
        by_storage_.clear();
      }
    }
    producer.storage = tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
    by_storage_.insert_or_assign(storage_of(tensor), std::move(producer));
  }

  void clear() { by_storage_.clear(); }

 private:
  static constexpr size_t kMax = 4096;
  std::unordered_map<const StorageImpl*, Producer> by_storage_;  // a weak reference keeps the address from being used again
};

// The weights that a thread has cast most recently.
class CastWeights {
 public:
  enum class Unchanged : int8_t { kNothing, kContent, kCast };

  // Note the cast of a weight. Return what has not changed since its last cast: nothing, the weight's content, or also the cast tensor.
  Unchanged note(const Tensor& weight, const Tensor& cast) {
    constexpr size_t kMaxWeights = 1 << 16;
    const uint64_t writes = engine.count_of_writes();
    if (writes != writes_seen_ || weights_.size() >= kMaxWeights) {
      weights_.clear();
      writes_seen_ = writes;
    }
    const Key key{weight.unsafeGetTensorImpl(), cast.scalar_type()};
    const auto found = weights_.find(key);
    Unchanged unchanged = Unchanged::kNothing;
    if (found != weights_.end() && found->second.content.matches(weight)) {
      unchanged = found->second.cast._unsafe_get_target() == cast.unsafeGetTensorImpl() ? Unchanged::kCast : Unchanged::kContent;
    }
    weights_.insert_or_assign(key, Weight{VersionStamp(weight, /*finds_holders=*/false), decltype(Weight::cast)(cast.getIntrusivePtr())});
    return unchanged;
  }

  void clear() { weights_.clear(); }

 private:
  struct Weight {
    VersionStamp content;
    c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl> cast;
  };
  std::unordered_map<Key, Weight, KeyHash> weights_;
  uint64_t writes_seen_ = 0;
};

// A region that was entered and not left yet.
struct EnteredRegion {
  const void* id;
  RegionKey key;
  uint64_t ops = 0, compiled = 0;
};

struct ObservedOp;

struct ThreadState {
  using Records = c10::SmallVector<std::shared_ptr<ThreadRecord>, 2>;

  // These three change wherever Python may run: copy them to iterate while it may.
  std::vector<std::shared_ptr<Recorder>> recorders;
  std::vector<std::shared_ptr<Recorder>> inherited;  // by a thread of autograd, while it runs a node
  Records records;                                   // of both

  uint64_t generation = 0;                                 // of the list of recorders
  std::optional<at::CallbackHandle> callback;              // for this thread alone
  const at::RecordFunction* event = nullptr;               // the last one that began, until it ends
  ObservedOp* op = nullptr;                                // the innermost one
  ObservedCall** const engines_op = engine.observed_op();  // a copy of `op` that the engine reads
  int uncounted = 0;                                       // by note_uncounted()
  int last_graph_task = -1;
  Producers producers;
  CastWeights weights;
  std::vector<EnteredRegion> regions;
  ska::flat_hash_map<const char*, const OpInfo*> ops;
  uint64_t ops_generation = 0;
  // Whether a recorder asks for these.
  bool timing = false, looks_for_nonfinite = false, numerics = false;
  bool node_has_grad_mode = false;  // of the autograd node that runs
  bool checks_inner_op = false;
  bool in_matmul = false;

  void set_op(ObservedOp* innermost);

  // Called when the recorders have changed.
  void find_records() {
    Records found;
    timing = looks_for_nonfinite = numerics = false;
    for (const auto* const list : {&recorders, &inherited}) {
      for (const auto& recorder : *list) {
        found.push_back(recorder->record());
        timing |= recorder->timing;
        looks_for_nonfinite |= recorder->nonfinite != NonFinitePolicy::kIgnore;
        numerics |= recorder->numerics;
      }
    }
    records.swap(found);
  }
};

// The context that torch passes from the beginning of an event to its end.
enum class ObservedKind : int8_t { kNode, kOp, kInnerMatmul };

struct Observed : at::ObserverContext {
  explicit Observed(ObservedKind kind) : kind(kind) {}

  const ObservedKind kind;
};

// An input of an op.
struct Input {
  const TensorImpl* tensor;
  Modules modules;  // of its producer
  SourceCounts source;
};

// A chain that an op ends.
struct EndedChain {
  Chain chain;
  ChainCounts counts;
  std::optional<Modules> modules;  // of the op in question, if it is not the one that ends the chain
};

// A call of an op that is counted.
struct ObservedOp final : Observed, ObservedCall {
  ObservedOp() : Observed(ObservedKind::kOp) {}

  ThreadState* state = nullptr;
  ObservedOp* outer = nullptr;
  const OpInfo* op = nullptr;
  const void* override = nullptr;
  int8_t device = -1;
  ScalarType fast = ScalarType::Undefined;
  bool backward = false, inner = false;
  bool cast_down = false;    // see Producer
  bool cast_inside = false;  // an inner op cast an input to float32
  bool is_wrapped = false;   // an input wraps other tensors, on which inner ops run
  bool only_checks = false;  // an inner op that is not counted, but checked for inf and nan
  bool checks = true;        // unless its inner ops are checked
  bool is_matmul = false;    // with a formula, and not inside an op with one
  Flops formula;
  double flops = 0;                  // its own, or those of its inner ops
  Tally<MatmulRows> rows;            // of the same matmuls
  const Outcome* outcome = nullptr;  // null: no recipe was asked
  bool has_new_output = false;       // one that is neither a view nor a copy
  DtypeCounts inputs;
  ScalarType widest = ScalarType::Undefined;
  std::chrono::steady_clock::time_point began;
  int fast_inputs = 0, float32_inputs = 0;  // with dimensions
  const OpInfo* fast_before = nullptr;      // see Producer
  std::optional<Producer> copied;
  Tally<CastCounts> casts;
  c10::SmallVector<const StorageImpl*, 6> storages;  // of the inputs
  c10::SmallVector<Input, 3> sources;                // inputs with dimensions, in the forward pass
  c10::SmallVector<EndedChain, 1> chains;
  std::vector<Tensor> changed;            // inputs that an op without outputs writes, such as _foreach_mul_
  c10::SmallVector<Tensor, 4> unchecked;  // inputs that it does not write, to be checked if an output is not finite
  bool inputs_were_finite = true;         // the others, checked before it ran
  std::unique_ptr<OpNumerics> numerics;   // null: nothing is counted
};

// A matmul inside an op without a formula of its own, to which its operations are added.
struct InnerMatmul final : Observed {
  InnerMatmul() : Observed(ObservedKind::kInnerMatmul) {}

  ObservedOp* outer = nullptr;
  Flops formula;
};

void ThreadState::set_op(ObservedOp* innermost) {
  op = innermost;
  *engines_op = innermost;
}

// This thread's state, or null.
constinit thread_local ThreadState* state_of_thread = nullptr;
constinit thread_local bool state_has_ended = false;  // with its thread

// Return this thread's state with its present recorders. Without a state, create one if asked to, or return null.
ThreadState* refreshed_state(bool create) {
  ThreadState* state = state_of_thread;
  const uint64_t generation = Recorders::generation.load(std::memory_order_acquire);
  if (state != nullptr && state->generation == generation) {
    return state;
  }
  static thread_local struct Owner {
    std::unique_ptr<ThreadState> state;
    ~Owner() {
      state_has_ended = true;
      state_of_thread = nullptr;
      if (state != nullptr) {
        *state->engines_op = nullptr;
        for (const auto& recorder : state->recorders) {
          recorder->end_thread();
        }
      }
    }
  } owner;
  if (state == nullptr) {
    if (!create || state_has_ended) {
      return nullptr;
    }
    owner.state = std::make_unique<ThreadState>();
    state = state_of_thread = owner.state.get();
  }
  std::vector<std::shared_ptr<Recorder>> found;
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    state->generation = Recorders::generation.load(std::memory_order_acquire);
    for (const auto& recorder : Recorders::running().recorders) {
      if (recorder->all_threads || recorder->thread == this_thread()) {
        found.push_back(recorder);
      }
    }
  }
  if (found.empty()) {
    state->producers.clear();
    state->weights.clear();
    state->regions.clear();
  }
  state->recorders.swap(found);
  state->find_records();
  return state;
}

// Return this thread's state, creating one only if a recorder sees all threads.
ThreadState* state_of_observed_thread() { return refreshed_state(Recorders::of_all_threads.load(std::memory_order_relaxed) != 0); }

}  // namespace
