// What is counted of calls of ops that are alike, of casts, of chains of ops and of regions.
//
// Owns nothing. Locks: those of the table that the counts are in.

#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tensors.h"

namespace {

// How many floating-point operations a call takes: so many, and so many for each element that it returns.
struct Flops {
  double fixed = 0, per_output = 0;
};
using FlopFormula = Flops (*)(c10::ArrayRef<const c10::IValue> arguments);

// What there is to know of an op besides its calls. These live as long as the process.
struct OpInfo {
  std::string name;
  size_t arguments = 0, returns = 0;
  std::vector<size_t> written;  // the arguments that it writes to
  std::vector<size_t> out;      // those that it reads nothing of
  bool makes_nothing_up = true;  // what it returns is computed, and not memory as it was found
  bool copies = false;           // what it returns has the value of what it is given
  bool converts = false;         // and may have another dtype, that the program asks for
  bool is_loss = false;
  FlopFormula flops = nullptr;  // of an op that multiplies matrices
};

// Sums, each for a dtype.
template <class Number>
class ByDtype {
 public:
  void add(ScalarType dtype, Number more = 1) {
    for (auto& [seen, sum] : sums_) {
      if (seen == dtype) {
        sum += more;
        return;
      }
    }
    sums_.emplace_back(dtype, more);
  }

  void add(const ByDtype& others) {
    for (const auto& [dtype, sum] : others) {
      add(dtype, sum);
    }
  }

  Number of(ScalarType dtype) const {
    for (const auto& [seen, sum] : sums_) {
      if (seen == dtype) {
        return sum;
      }
    }
    return 0;
  }

  bool empty() const { return sums_.empty(); }
  auto begin() const { return sums_.begin(); }
  auto end() const { return sums_.end(); }

 private:
  c10::SmallVector<std::pair<ScalarType, Number>, 2> sums_;
};

using DtypeCounts = ByDtype<int64_t>;

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

// The floating-point tensors that an op was given, by the op that made them.
struct SourceCounts {
  const OpInfo* op;  // null: none that is known
  int module;
  ScalarType dtype, cast;  // Undefined: it was not cast
  bool is_first;           // of the op's tensors
  ScalarType asked_from;   // what the op computed in, where the program asked for this dtype; Undefined: it did not
  uint64_t count = 0, bytes = 0, casts = 0, cast_bytes = 0;

  bool is_like(const SourceCounts& other) const {
    return op == other.op && module == other.module && dtype == other.dtype && cast == other.cast &&
        is_first == other.is_first && asked_from == other.asked_from;
  }
};

class Sources {
 public:
  void add(SourceCounts more) {
    for (SourceCounts& each : sources_) {
      if (each.is_like(more)) {
        each.count += more.count;
        each.bytes += more.bytes;
        each.casts += more.casts;
        each.cast_bytes += more.cast_bytes;
        return;
      }
    }
    if (sources_.size() >= kMost && more.op != nullptr) {  // code outside of all modules may gather what thousands made
      more.op = nullptr;
      more.module = kNoModule;
      add(more);
      return;
    }
    sources_.push_back(more);
  }

  auto begin() const { return sources_.begin(); }
  auto end() const { return sources_.end(); }

 private:
  static constexpr size_t kMost = 32;
  c10::SmallVector<SourceCounts, 2> sources_;
};

// What calls of an op are told apart by. An override is told by its address: the recorder holds it.
struct Where {
  const OpInfo* op;
  const void* override;
  int module;
  int8_t device;  // the one whose autocast looked; -1: none did
  ScalarType fast;
  bool backward;

  bool operator==(const Where& other) const {
    return op == other.op && override == other.override && module == other.module && device == other.device &&
        fast == other.fast && backward == other.backward;
  }
};

struct WhereHash {
  size_t operator()(const Where& where) const {
    const auto mix = [](size_t hash, size_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15ull; };
    size_t hash = mix(reinterpret_cast<uintptr_t>(where.op) >> 4, reinterpret_cast<uintptr_t>(where.override));
    hash = mix(hash, static_cast<size_t>(where.module) * 512 + static_cast<size_t>(where.device) * 2 + where.backward);
    return mix(hash, static_cast<size_t>(where.fast)) >> 7;
  }
};

struct Counts {
  uint64_t calls = 0, inner_calls = 0;
  DtypeCounts inputs, computes, outputs;
  ByDtype<double> seconds;  // of calls that are in no other, by what they compute in
  CastsByKind casts;
  Sources sources;  // in the forward pass, where autocast looks
  size_t stack = 0;  // of the first call, where these are kept: its number with the recorder, from 1 on

  void add(const Counts& other) {
    calls += other.calls;
    inner_calls += other.inner_calls;
    inputs.add(other.inputs);
    computes.add(other.computes);
    outputs.add(other.outputs);
    seconds.add(other.seconds);
    for (const CastCounts& each : other.casts) {
      casts.add(each);
    }
    for (const SourceCounts& each : other.sources) {
      sources.add(each);
    }
  }
};

// Ops one after the other that a finding may be about; see Chain in observer/records.py.
enum class ChainKind : int8_t { kRoundTrip, kFloat32ByOneInput, kUnlistedFloat32, kLoss, kLossRoot };
constexpr const char* kChainKinds[] = {"round_trip", "float32_by_one_input", "unlisted_float32_op", "loss", "loss_root"};

struct Chain {
  ChainKind kind;
  std::array<const OpInfo*, 3> ops;  // or one that has the name of a node
  const void* override;             // of the op that it is about
  int module;
  int8_t device;
  ScalarType fast;
  int consumer = kNoModule;  // the module that took what an op in another returned, where that is the one that it is about

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

// What a recipe made of a call: it was computed by it, or declined for a reason. These live as long as the process.
using Outcome = std::pair<std::string, std::string>;

// What calls of ops that multiply matrices are told apart by.
struct Matmul {
  const OpInfo* op;
  const void* override;
  const Outcome* outcome;  // null: no recipe was asked
  int module;
  int8_t device;
  ScalarType fast;
  bool backward;

  auto key() const { return std::tie(op, override, outcome, module, device, fast, backward); }
  bool operator<(const Matmul& other) const { return key() < other.key(); }
};

struct MatmulCounts {
  uint64_t calls = 0;
  double flops = 0;

  void add(const MatmulCounts& other) {
    calls += other.calls;
    flops += other.flops;
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

}  // namespace
