// What a thread knows of those who observe it, and the op that it is in.
//
// Owns each thread's watch. Locks: Recorders::mutex, where who observes has changed.

#pragma once

#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "content.h"
#include "observing.h"
#include "recorder.h"

namespace {

// The module that an op ran in, for each table that counted it.
class Modules {
 public:
  void add(const Table& table) { modules_.emplace_back(table.serial, table.module()); }

  int of(const Table& table) const {
    for (const auto& [serial, module] : modules_) {
      if (serial == table.serial) {
        return module;
      }
    }
    return kNoModule;
  }

 private:
  c10::SmallVector<std::pair<uint64_t, int>, 1> modules_;
};

// What an op returned, for the ops that take it.
struct Producer {
  c10::weak_intrusive_ptr<StorageImpl> storage{c10::intrusive_ptr<StorageImpl>()};
  const OpInfo* op = nullptr;
  const OpInfo* fast_before = nullptr;  // of one that computed in float32: the op before that did not
  const void* override = nullptr;
  int8_t device = -1;
  ScalarType computes = ScalarType::Undefined;
  bool cast_down = false;  // an activation that another op had computed in float32
  bool is_noted = false;   // in a chain
  ScalarType asked_from = ScalarType::Undefined;  // what it was computed in, where the program asked for the dtype that it has
  Modules modules;
};

// The last producers, by storage. Those whose storage has died make room first.
class Producers {
 public:
  Producer* find(const Tensor& tensor) const {
    if (sets_ == nullptr || !tensor.has_storage()) {
      return nullptr;
    }
    const StorageImpl* const storage = storage_of(tensor);
    for (Producer& each : set_of(storage)) {
      if (each.storage._unsafe_get_target() == storage && each.op != nullptr) {
        return &each;
      }
    }
    return nullptr;
  }

  void set(const Tensor& tensor, Producer producer) {
    if (sets_ == nullptr) {
      sets_ = std::make_unique<std::array<Set, kSets>>();
    }
    const StorageImpl* const storage = storage_of(tensor);
    Set& set = set_of(storage);
    Producer* place = nullptr;
    for (Producer& each : set) {
      if (each.storage._unsafe_get_target() == storage) {
        place = &each;
        break;
      }
      if (place == nullptr && (each.op == nullptr || each.storage.expired())) {
        place = &each;
      }
    }
    if (place == nullptr) {
      place = &set[next_++ % set.size()];
    }
    producer.storage = tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
    *place = std::move(producer);
  }

  void clear() { sets_.reset(); }

 private:
  static constexpr size_t kSets = 128;
  using Set = std::array<Producer, 4>;

  Set& set_of(const StorageImpl* storage) const {
    return (*sets_)[(reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15ull >> 57];
  }

  std::unique_ptr<std::array<Set, kSets>> sets_;
  size_t next_ = 0;
};

struct ObservedOp;

// A region that was entered while it was observed, and is not left yet.
struct EnteredRegion {
  const void* id;
  RegionKey key;
  uint64_t ops = 0, compiled = 0;
};

// A tensor that an op was given.
struct Given {
  const TensorImpl* tensor;
  Modules modules;  // of the op that made it, in which `source` has none
  SourceCounts source;
};

// A chain that an op ends, to be counted by each table.
struct EndedChain {
  Chain chain;
  ChainCounts counts;
  std::optional<Modules> modules;  // of the op that it is about; without, that is the one that ends it
};

// What a thread knows of those who observe it. Its recorders and tables change wherever Python may run: whoever walks them
// while it may has a copy.
struct Watch {
  using Tables = c10::SmallVector<std::shared_ptr<Table>, 2>;

  std::vector<std::shared_ptr<Recorder>> recorders;
  std::vector<std::shared_ptr<Recorder>> lent;  // those that see a thread of autograd's for as long as it runs a node
  Tables tables;                                // of each
  uint64_t generation = 0;
  std::optional<at::CallbackHandle> callback;  // this thread's own
  const at::RecordFunction* event = nullptr;   // the one that began last, until it ends
  ObservedOp* op = nullptr;                    // the innermost
  ObservedCall** const engines_op = engine.observed_op();  // the same, where the engine looks
  int compiling = 0;
  int last_graph_task = -1;
  Producers producers;
  struct Weight {
    Content content;
    c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl> cast;
  };
  std::unordered_map<Key, Weight, KeyHash> weights;  // as they were when they were cast last
  std::vector<EnteredRegion> regions;
  uint64_t writes_seen = 0;
  ska::flat_hash_map<const char*, const OpInfo*> ops;
  uint64_t ops_generation = 0;
  bool timing = false, looks_for_nonfinite = false;
  bool looking = false;    // in an op that only looks
  bool in_matmul = false;  // in one whose operations are counted

  static constexpr size_t kMostWeights = 1 << 16;

  // The thread is in an op now, or in none.
  void be_in(ObservedOp* now);

  // Called after the recorders have changed.
  void find_tables() {
    Tables found;
    timing = looks_for_nonfinite = false;
    for (const auto* const those : {&recorders, &lent}) {
      for (const auto& recorder : *those) {
        found.push_back(recorder->table_of(at::RecordFunction::currentThreadId()));
        timing |= recorder->timing;
        looks_for_nonfinite |= recorder->nonfinite != NonFinitePolicy::kIgnore;
      }
    }
    tables.swap(found);
  }

  enum class Last : int8_t { kNone, kSameContent, kSameCast };

  // Note the cast of a weight; say what is the same as it was at the last one.
  Last note_cast(const Tensor& weight, const Tensor& cast) {
    const uint64_t writes = engine.count_of_writes();
    if (writes != writes_seen || weights.size() >= kMostWeights) {
      weights.clear();
      writes_seen = writes;
    }
    const Key key{weight.unsafeGetTensorImpl(), cast.scalar_type()};
    const auto found = weights.find(key);
    Last last = Last::kNone;
    if (found != weights.end() && found->second.content.is_that_of(weight)) {
      last = found->second.cast._unsafe_get_target() == cast.unsafeGetTensorImpl() ? Last::kSameCast : Last::kSameContent;
    }
    weights.insert_or_assign(key, Weight{Content(weight), decltype(Weight::cast)(cast.getIntrusivePtr())});
    return last;
  }
};

enum class ObservedKind : int8_t { kNode, kOp, kPart };

struct Observed : at::ObserverContext {
  explicit Observed(ObservedKind kind) : kind(kind) {}

  const ObservedKind kind;
};

// A call of an op that is being counted.
struct ObservedOp final : Observed, ObservedCall {
  ObservedOp() : Observed(ObservedKind::kOp) {}

  Watch* watch = nullptr;
  ObservedOp* outer = nullptr;
  const OpInfo* op = nullptr;
  const void* override = nullptr;
  int8_t device = -1;
  ScalarType fast = ScalarType::Undefined;
  bool backward = false, inner = false, cast_down = false;
  bool is_wrapped = false;   // a tensor that it was given has others in it, on which ops run that this op is made of
  bool only_looks = false;   // for inf and nan, in an op that is counted
  bool looks = true;         // unless the op that it is made of does
  bool is_matmul = false;    // with a formula for its operations, in none that has one
  Flops formula;
  double flops = 0;                  // of the ops that it is made of
  const Outcome* outcome = nullptr;  // of the recipe that it was to be computed by
  bool makes = false;        // it returns what is neither a view nor a copy
  DtypeCounts inputs;
  ScalarType widest = ScalarType::Undefined;
  std::chrono::steady_clock::time_point began;
  int fast_inputs = 0, float32_inputs = 0;  // with dimensions
  const OpInfo* fast_before = nullptr;
  std::optional<Producer> copied;
  CastsByKind casts;
  c10::SmallVector<const StorageImpl*, 6> storages;    // of the inputs
  c10::SmallVector<Given, 3> given;  // those with dimensions, in the forward pass
  c10::SmallVector<EndedChain, 1> chains;
  c10::SmallVector<Tensor, 4> tensors;  // the inputs that nothing writes, where it is asked whether they are finite
  bool inputs_were_finite = true;       // those that are written, and numbers
};

// A call of an op that multiplies matrices, in one that is counted and does not say how many operations it takes.
struct ObservedPart final : Observed {
  ObservedPart() : Observed(ObservedKind::kPart) {}

  ObservedOp* outer = nullptr;
  Flops formula;
};

void Watch::be_in(ObservedOp* now) {
  op = now;
  *engines_op = now;
}

// How many recorders there are that see all threads.
std::atomic<int> recorders_of_all{0};

// The thread's, or null.
constinit thread_local Watch* watch_of_thread = nullptr;
constinit thread_local bool watch_has_ended = false;  // with its thread

// Which recorders see this thread has changed: look again. Returns null where none does.
Watch* refreshed_watch(bool create) {
  Watch* watch = watch_of_thread;
  const uint64_t generation = Recorders::generation.load(std::memory_order_acquire);
  if (watch != nullptr && watch->generation == generation) {
    return watch;
  }
  static thread_local struct Owner {
    std::unique_ptr<Watch> watch;
    ~Owner() {
      watch_has_ended = true;
      watch_of_thread = nullptr;
      if (watch != nullptr) {
        *watch->engines_op = nullptr;
        for (const auto& recorder : watch->recorders) {
          recorder->end_thread(at::RecordFunction::currentThreadId());
        }
      }
    }
  } owner;
  if (watch == nullptr) {
    if (!create || watch_has_ended) {
      return nullptr;
    }
    owner.watch = std::make_unique<Watch>();
    watch = watch_of_thread = owner.watch.get();
  }
  std::vector<std::shared_ptr<Recorder>> found;
  {
    std::lock_guard<std::mutex> lock(Recorders::running().mutex);
    watch->generation = Recorders::generation.load(std::memory_order_acquire);
    for (const auto& recorder : Recorders::running().recorders) {
      if (recorder->all_threads || recorder->thread_number == at::RecordFunction::currentThreadId()) {
        found.push_back(recorder);
      }
    }
  }
  if (found.empty()) {
    watch->producers.clear();
    watch->weights.clear();
    watch->regions.clear();
  }
  watch->recorders.swap(found);
  watch->find_tables();
  return watch;
}

}  // namespace
