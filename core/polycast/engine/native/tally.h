// What is counted while something observes: by op, module and pass, in bounded memory.
//
// Owns the recorders' counts. An observation (Recorder) has a Table for each thread that it sees, which the thread fills. A
// thread's Watch has the tables that it fills now and the op that it is in; kernels look at that op alone, which is null where
// nothing observes, and add their casts to it.
//
// Locks. Recorders::mutex() for who observes what; it is taken when that changes. A table has a mutex, for its readers: its
// thread takes it once an op, and no other unless they read. Neither is held while the GIL is taken or a tensor is destroyed.

#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store.h"

namespace {

using c10::DeviceType;

// What there is to know of an op besides its calls. These live as long as the process.
struct OpInfo {
  std::string name;
  size_t arguments = 0, returns = 0;
  std::vector<size_t> written;  // the arguments that it writes to
  std::vector<size_t> out;      // those that it reads nothing of
  bool makes_nothing_up = true;  // what it returns is computed, and not memory as it was found
  bool copies = false;           // what it returns has the value of what it is given
  bool is_loss = false;
};

class DtypeCounts {
 public:
  void add(ScalarType dtype, int64_t count = 1) {
    for (auto& [seen, number] : counts_) {
      if (seen == dtype) {
        number += count;
        return;
      }
    }
    counts_.emplace_back(dtype, count);
  }

  void add(const DtypeCounts& others) {
    for (const auto& [dtype, count] : others.counts_) {
      add(dtype, count);
    }
  }

  int64_t of(ScalarType dtype) const {
    for (const auto& [seen, number] : counts_) {
      if (seen == dtype) {
        return number;
      }
    }
    return 0;
  }

  bool empty() const { return counts_.empty(); }
  auto begin() const { return counts_.begin(); }
  auto end() const { return counts_.end(); }

 private:
  c10::SmallVector<std::pair<ScalarType, int64_t>, 2> counts_;
};

// The casts of one kind.
struct CastCounts {
  ScalarType source, target;
  bool of_weight;
  uint64_t count = 0, bytes = 0, hits = 0, misses = 0, recasts = 0, recast_bytes = 0;
  double seconds = 0;

  void add(const CastCounts& other) {
    count += other.count;
    bytes += other.bytes;
    hits += other.hits;
    misses += other.misses;
    recasts += other.recasts;
    recast_bytes += other.recast_bytes;
    seconds += other.seconds;
  }
};

class CastsByKind {
 public:
  void add(const CastCounts& casts) {
    for (CastCounts& each : casts_) {
      if (each.source == casts.source && each.target == casts.target && each.of_weight == casts.of_weight) {
        each.add(casts);
        return;
      }
    }
    casts_.push_back(casts);
  }

  bool empty() const { return casts_.empty(); }
  auto begin() const { return casts_.begin(); }
  auto end() const { return casts_.end(); }

 private:
  c10::SmallVector<CastCounts, 2> casts_;
};

constexpr int kNoModule = -1;

// What calls of an op are told apart by. An overlay is told by its address: the recorder holds it.
struct Where {
  const OpInfo* op;
  const void* overlay;
  int module;
  int8_t device;  // the one whose autocast looked; -1: none did
  ScalarType fast;
  bool backward;

  bool operator==(const Where& other) const {
    return op == other.op && overlay == other.overlay && module == other.module && device == other.device &&
        fast == other.fast && backward == other.backward;
  }
};

struct WhereHash {
  size_t operator()(const Where& where) const {
    const auto mix = [](size_t hash, size_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15ull; };
    size_t hash = mix(reinterpret_cast<uintptr_t>(where.op) >> 4, reinterpret_cast<uintptr_t>(where.overlay));
    hash = mix(hash, static_cast<size_t>(where.module) * 512 + static_cast<size_t>(where.device) * 2 + where.backward);
    return mix(hash, static_cast<size_t>(where.fast)) >> 7;
  }
};

struct Counts {
  uint64_t calls = 0, inner_calls = 0;
  DtypeCounts inputs, computes, outputs;
  c10::SmallVector<std::pair<ScalarType, double>, 1> seconds;  // of calls that are in no other, by what they compute in
  CastsByKind casts;
  size_t stack = 0;  // of the first call, where these are kept: its number with the recorder, from 1 on

  void add_seconds(ScalarType dtype, double more) {
    for (auto& [seen, sum] : seconds) {
      if (seen == dtype) {
        sum += more;
        return;
      }
    }
    seconds.emplace_back(dtype, more);
  }

  void add(const Counts& other) {
    calls += other.calls;
    inner_calls += other.inner_calls;
    inputs.add(other.inputs);
    computes.add(other.computes);
    outputs.add(other.outputs);
    for (const auto& [dtype, sum] : other.seconds) {
      add_seconds(dtype, sum);
    }
    for (const CastCounts& each : other.casts) {
      casts.add(each);
    }
  }
};

// Ops one after the other that a finding may be about; see Chain in precision/observe/records.py.
enum class ChainKind : int8_t { kRoundTrip, kFloat32ByOneInput, kUnlistedFloat32, kLoss, kLossRoot };

struct Chain {
  ChainKind kind;
  std::array<const OpInfo*, 3> ops;  // or one that has the name of a node
  const void* overlay;             // of the op that it is about
  int module;
  int8_t device;
  ScalarType fast;

  auto key() const { return std::tie(kind, ops, overlay, module, device, fast); }
  bool operator<(const Chain& other) const { return key() < other.key(); }
};

struct ChainCounts {
  uint64_t count = 0, bytes = 0;

  void add(const ChainCounts& other) {
    count += other.count;
    bytes += other.bytes;
  }
};

// A region by the place that entered it.
using RegionKey = std::tuple<std::string, int8_t, bool, ScalarType>;

struct RegionCounts {
  uint64_t entries = 0, unused = 0, ops = 0;

  void add(const RegionCounts& other) {
    entries += other.entries;
    unused += other.unused;
    ops += other.ops;
  }
};

class Recorder;

// What one thread counts for one recorder, or what threads that have ended have counted.
class Table {
 public:
  explicit Table(Recorder* recorder) : recorder(recorder) {}

  Recorder* const recorder;  // valid while it runs
  std::mutex mutex;
  ska::flat_hash_map<Where, std::unique_ptr<Counts>, WhereHash> counts;
  std::unordered_map<int, uint64_t> entries;  // by module, how often it was called
  std::map<Chain, ChainCounts> chains;
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

enum class NonFinitePolicy : int8_t { kIgnore, kRecord, kRaise };

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
    LeftBehind::things().leave(std::make_shared<std::tuple<decltype(overlays), decltype(python_stacks), decltype(first)>>(
        std::move(overlays), std::move(python_stacks), std::move(first)));
  }

  const bool all_threads, timing, stacks;
  const NonFinitePolicy nonfinite;
  const std::thread::id thread = std::this_thread::get_id();
  const uint64_t thread_number = at::RecordFunction::currentThreadId();

  // The rest is guarded by the mutex, which is taken before that of a table.
  std::mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<Table>> tables;  // by torch's number of the thread
  Table of_ended_threads{this};
  std::unordered_map<const void*, Object> overlays;
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

// What an op returned, for the ops that take it.
struct Producer {
  c10::weak_intrusive_ptr<StorageImpl> storage{c10::intrusive_ptr<StorageImpl>()};
  const OpInfo* op = nullptr;
  const OpInfo* fast_before = nullptr;  // of one that computed in float32: the op before that did not
  const void* overlay = nullptr;
  int8_t device = -1;
  ScalarType computes = ScalarType::Undefined;
  bool cast_down = false;  // an activation that another op had computed in float32
};

// The last producers, by storage.
class Producers {
 public:
  const Producer* find(const Tensor& tensor) const {
    if (slots_ == nullptr || !tensor.has_storage()) {
      return nullptr;
    }
    const StorageImpl* const storage = storage_of(tensor);
    const Producer& slot = slot_of(storage);
    return slot.op != nullptr && slot.storage._unsafe_get_target() == storage ? &slot : nullptr;
  }

  void set(const Tensor& tensor, Producer producer) {
    if (slots_ == nullptr) {
      slots_ = std::make_unique<std::array<Producer, kSlots>>();
    }
    producer.storage = tensor.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
    slot_of(storage_of(tensor)) = std::move(producer);
  }

  void clear() { slots_.reset(); }

 private:
  static constexpr size_t kSlots = 512;

  Producer& slot_of(const StorageImpl* storage) const {
    return (*slots_)[(reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15ull >> 55];
  }

  std::unique_ptr<std::array<Producer, kSlots>> slots_;
};

struct ObservedOp;

// A region that was entered while it was observed, and is not left yet.
struct EnteredRegion {
  const void* id;
  RegionKey key;
  uint64_t ops = 0;
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
  ObservedOp* op = nullptr;                    // the innermost
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
  bool looking = false;  // in an op that only looks

  static constexpr size_t kMostWeights = 1 << 16;

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
    const uint64_t writes = Writes::log().count();
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

struct Observed : at::ObserverContext {
  explicit Observed(bool is_node) : is_node(is_node) {}

  const bool is_node;  // or an op
};

// A call of an op that is being counted.
struct ObservedOp final : Observed {
  ObservedOp() : Observed(false) {}

  Watch* watch = nullptr;
  ObservedOp* outer = nullptr;
  const OpInfo* op = nullptr;
  const void* overlay = nullptr;
  int8_t device = -1;
  ScalarType fast = ScalarType::Undefined;
  bool backward = false, inner = false, cast_down = false;
  bool is_wrapped = false;   // a tensor that it was given has others in it, on which ops run that this op is made of
  bool only_looks = false;   // for inf and nan, in an op that is counted
  bool looks = true;         // unless the op that it is made of does
  DtypeCounts inputs;
  ScalarType widest = ScalarType::Undefined;
  std::chrono::steady_clock::time_point began;
  int fast_inputs = 0, float32_inputs = 0;  // with dimensions
  const OpInfo* fast_before = nullptr;
  std::optional<Producer> copied;
  CastsByKind casts;
  c10::SmallVector<const StorageImpl*, 6> storages;    // of the inputs
  c10::SmallVector<std::pair<Chain, uint64_t>, 1> chains;  // with bytes
  c10::SmallVector<Tensor, 4> tensors;  // the inputs that nothing writes, where it is asked whether they are finite
  bool inputs_were_finite = true;       // those that are written, and numbers
};

// How many recorders there are that see all threads.
std::atomic<int> recorders_of_all{0};

// The thread's, or null. What kernels look at is the op alone.
constinit thread_local Watch* watch_of_thread = nullptr;
constinit thread_local ObservedOp* observed_op = nullptr;
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
      observed_op = nullptr;
      if (watch != nullptr) {
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
      if (recorder->all_threads || recorder->thread == std::this_thread::get_id()) {
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

// Set by bind(); it lives as long as the process.
PyObject* place_now = nullptr;

// A region is entered. Called with the GIL held.
void note_entry(const void* id, DeviceType device, bool enabled, ScalarType fast) {
  Watch* const watch = refreshed_watch(recorders_of_all.load(std::memory_order_relaxed) != 0);
  if (watch == nullptr || watch->tables.empty()) {
    return;
  }
  const RegionKey key{string_of(call(place_now).get()), static_cast<int8_t>(device), enabled, fast};
  for (const auto& table : watch->tables) {
    std::lock_guard<std::mutex> lock(table->mutex);
    ++table->regions[key].entries;
  }
  watch->regions.push_back({id, key});
}

// A region is left, whose ops are those of the region around it, too.
void note_exit(const void* id) {
  Watch* const watch = watch_of_thread;
  if (watch == nullptr) {
    return;
  }
  const auto found =
      std::find_if(watch->regions.rbegin(), watch->regions.rend(), [id](const auto& region) { return region.id == id; });
  if (found == watch->regions.rend()) {
    return;
  }
  const EnteredRegion left = std::move(*found);
  const auto place = watch->regions.erase(std::next(found).base());
  for (auto outer = std::make_reverse_iterator(place); outer != watch->regions.rend(); ++outer) {
    if (std::get<1>(outer->key) == std::get<1>(left.key)) {
      outer->ops += left.ops;
      break;
    }
  }
  for (const auto& table : watch->tables) {
    std::lock_guard<std::mutex> lock(table->mutex);
    const auto counts = table->regions.find(left.key);
    if (counts != table->regions.end()) {  // or it was entered before this one observed
      counts->second.ops += left.ops;
      counts->second.unused += left.ops == 0;
    }
  }
}

// An op was seen that autocast for a device looks at.
void note_op_in_region(Watch& watch, int8_t device) {
  for (auto region = watch.regions.rbegin(); region != watch.regions.rend(); ++region) {
    if (std::get<1>(region->key) == device) {
      ++region->ops;
      return;
    }
  }
}

}  // namespace
