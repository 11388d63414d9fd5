// Counts of ops, casts, chains of ops and regions, and the keys by which they are counted.
//
// Locks: none; a ThreadRecord's mutex guards the counts in it.

#pragma once

#include <map>
#include <tuple>

#include "numerics_counts.h"
#include "tensors.h"

namespace {

// The floating-point operations of a call, and the rows of its activations: a fixed number, and one for each element of the output.
struct Flops {
  double fixed = 0, per_output = 0;
  const char* kind = nullptr;  // the op in a polycast.DeviceProfile, a literal of flops.h; null: none
  double rows = 0, rows_per_output = 0;
};
using FlopFormula = Flops (*)(c10::ArrayRef<const c10::IValue> arguments);

// Traits of an op, by its schema. They live as long as the process.
struct OpInfo {
  std::string name;
  size_t arguments = 0, returns = 0;
  std::vector<size_t> written;       // the arguments that it writes
  std::vector<size_t> out;           // the arguments that it writes and does not read
  bool has_uninitialized_output = false;
  bool copies = false;    // its output has the values of its input
  bool converts = false;  // and the dtype that the program asks for
  bool moves = false;  // it copies, also into another tensor
  bool multiplies = false;  // two matrices, or two batches of them, which are its inputs
  bool is_loss = false;
  bool has_tensors = true;  // among its arguments or results
  FlopFormula flops = nullptr;  // null: it is not a matmul
};

// Rows that are added up if they are alike. There are few, so they are searched one by one.
template <class Row>
class Tally {
 public:
  // Add to a row that is there; return whether there is one.
  bool add_to_known(const Row& more) {
    for (Row& row : rows_) {
      if (row.is_like(more)) {
        row.add(more);
        return true;
      }
    }
    return false;
  }

  void add(const Row& more) {
    if (!add_to_known(more)) {
      rows_.push_back(more);
    }
  }

  void add(const Tally& others) {
    for (const Row& row : others) {
      add(row);
    }
  }

  size_t size() const { return rows_.size(); }
  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

 private:
  c10::SmallVector<Row, 2> rows_;
};

template <class Number>
struct DtypeSum {
  ScalarType dtype;
  Number sum = 1;

  bool is_like(const DtypeSum& other) const { return dtype == other.dtype; }
  void add(const DtypeSum& other) { sum += other.sum; }
};
using DtypeCounts = Tally<DtypeSum<int64_t>>;

struct CastCounts {
  ScalarType source, target;
  bool of_weight;
  uint64_t count = 0, bytes = 0, hits = 0, misses = 0, recasts = 0, recast_bytes = 0;
  double seconds = 0;

  bool is_like(const CastCounts& other) const {
    return source == other.source && target == other.target && of_weight == other.of_weight;
  }
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

// Matmuls with activations of the same number of rows.
struct MatmulRows {
  const char* kind;  // as in Flops
  int64_t rows;
  uint64_t calls = 1;
  double flops = 0;

  bool is_like(const MatmulRows& other) const { return kind == other.kind && rows == other.rows; }
  void add(const MatmulRows& other) {
    calls += other.calls;
    flops += other.flops;
  }
};

constexpr int kNoModule = -1;

// Floating-point inputs of an op, by the op that made them.
struct SourceCounts {
  const OpInfo* op = nullptr;  // null: unknown
  int module = kNoModule;
  ScalarType dtype, cast = ScalarType::Undefined;  // Undefined: not cast
  bool is_first;                                   // among the op's tensors
  ScalarType asked_from = ScalarType::Undefined;   // what `op` computed in, if the program asked for `dtype`
  uint64_t count = 0, bytes = 0, casts = 0, cast_bytes = 0;

  bool is_like(const SourceCounts& other) const {
    return op == other.op && module == other.module && dtype == other.dtype && cast == other.cast &&
        is_first == other.is_first && asked_from == other.asked_from;
  }
  void add(const SourceCounts& other) {
    count += other.count;
    bytes += other.bytes;
    casts += other.casts;
    cast_bytes += other.cast_bytes;
  }
};

// A recipe, and why it declined an op; empty: it computed it. These live as long as the process.
using Outcome = std::pair<std::string, std::string>;

// The state in which an op is called. An override is identified by its address: the recorder holds it.
struct CallKey {
  const OpInfo* op;
  const void* override;
  const Outcome* outcome;  // null: no recipe was asked
  int module;
  int8_t device;  // whose autocast the op reached; -1: none
  ScalarType fast;
  bool backward;

  auto key() const { return std::tie(op, override, outcome, module, device, fast, backward); }
  bool operator==(const CallKey& other) const { return key() == other.key(); }
};

struct CallKeyHash {
  size_t operator()(const CallKey& key) const {
    const auto mix = [](size_t hash, size_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15ull; };
    size_t hash = mix(reinterpret_cast<uintptr_t>(key.op) >> 4, reinterpret_cast<uintptr_t>(key.override));
    hash = mix(hash, reinterpret_cast<uintptr_t>(key.outcome));
    hash = mix(hash, static_cast<size_t>(key.module) * 512 + static_cast<size_t>(key.device) * 2 + key.backward);
    return mix(hash, static_cast<size_t>(key.fast)) >> 7;
  }
};

struct CallCounts {
  uint64_t calls = 0, inner_calls = 0;
  DtypeCounts inputs, computes, outputs;
  Tally<DtypeSum<double>> seconds;  // of calls outside of other ops, by what they compute in
  Tally<CastCounts> casts;
  Tally<SourceCounts> sources;  // in the forward pass, if the op reached autocast
  size_t stack = 0;             // of the first call: its number in the recorder, from 1 on
  double flops = 0;
  Tally<MatmulRows> rows;

  void add_rows(MatmulRows more) {
    constexpr size_t kMaxRows = 16;  // a text of any length may be the input
    if (rows.add_to_known(more)) {
      return;
    }
    if (rows.size() >= kMaxRows) {
      int64_t power = 1;
      while (power < more.rows) {
        power *= 2;
      }
      more.rows = power;
    }
    rows.add(more);
  }

  void add_source(SourceCounts source) {
    constexpr size_t kMaxSources = 32;  // code outside of all modules may use the outputs of thousands of ops
    if (sources.add_to_known(source)) {
      return;
    }
    if (sources.size() >= kMaxSources) {
      source.op = nullptr;
      source.module = kNoModule;
    }
    sources.add(source);
  }

  void add(const CallCounts& other) {
    calls += other.calls;
    inner_calls += other.inner_calls;
    flops += other.flops;
    inputs.add(other.inputs);
    computes.add(other.computes);
    outputs.add(other.outputs);
    seconds.add(other.seconds);
    casts.add(other.casts);
    for (const MatmulRows& each : other.rows) {
      add_rows(each);
    }
    for (const SourceCounts& source : other.sources) {
      add_source(source);
    }
  }
};

// The kinds of chains; see Chain in observe/records.py.
enum class ChainKind : int8_t { kRoundTrip, kFloat32ByOneInput, kUnlistedFloat32, kLoss, kLossRoot };
constexpr const char* kChainKinds[] = {"round_trip", "float32_by_one_input", "unlisted_float32_op", "loss", "loss_root"};

struct Chain {
  ChainKind kind;
  std::array<const OpInfo*, 3> ops;  // for kLossRoot, an entry with the name of an autograd node
  const void* override = nullptr;    // of the op in question, as are the next three
  int module = kNoModule;
  int8_t device = -1;
  ScalarType fast;
  int consumer = kNoModule;  // the module of the last op, if it is not the op in question

  auto key() const { return std::tie(kind, ops, override, module, device, fast, consumer); }
  bool operator<(const Chain& other) const { return key() < other.key(); }
};

struct ChainCounts {
  uint64_t count = 0, bytes = 0, casts = 0;

  void add(const ChainCounts& other) {
    count += other.count;
    bytes += other.bytes;
    casts += other.casts;
  }
};

// A region, by the line that entered it.
struct RegionKey {
  std::string call_site;
  bool by_module_rule;
  int8_t device;
  bool enabled;
  ScalarType dtype;

  auto key() const { return std::tie(call_site, by_module_rule, device, enabled, dtype); }
  bool operator<(const RegionKey& other) const { return key() < other.key(); }
};

struct RegionCounts {
  uint64_t entries = 0, unused = 0, ops = 0, compiled = 0;

  void add(const RegionCounts& other) {
    entries += other.entries;
    unused += other.unused;
    ops += other.ops;
    compiled += other.compiled;
  }
};

// All counts of a thread, or of several.
struct Totals {
  ska::flat_hash_map<CallKey, std::unique_ptr<CallCounts>, CallKeyHash> ops;
  std::unordered_map<int, uint64_t> entries;  // calls by module
  std::map<Chain, ChainCounts> chains;
  std::map<RegionKey, RegionCounts> regions;
  std::map<NumericsKey, NumericsCounts> numerics;
  std::map<std::pair<std::string, int>, uint64_t> compiled;  // calls by region of compiled code and module

  void add(const Totals& other) {
    for (const auto& [key, more] : other.ops) {
      auto& counts = ops[key];
      if (counts == nullptr) {
        counts = std::make_unique<CallCounts>(*more);
      } else {
        counts->add(*more);
      }
    }
    const auto add_all = [](auto& sums, const auto& others) {
      for (const auto& [key, more] : others) {
        sums[key].add(more);
      }
    };
    const auto add_numbers = [](auto& sums, const auto& others) {
      for (const auto& [key, more] : others) {
        sums[key] += more;
      }
    };
    add_numbers(entries, other.entries);
    add_all(chains, other.chains);
    add_all(regions, other.regions);
    add_all(numerics, other.numerics);
    add_numbers(compiled, other.compiled);
  }
};

}  // namespace
