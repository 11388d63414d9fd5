// What a recorder has counted, as Python objects; see Reading in engine/recorder.py.
//
// Owns nothing. Locks: those of the recorder and its tables, one at a time, and never while Python may run: what it allocates may
// begin a collection, which may run anything.

#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tally.h"

namespace {

// What a recorder has counted, for Python; called with the GIL held.
class Reading {
 public:
  static py::dict of(Recorder& recorder) {
    py::list counts, entries, chains, regions, compiled;
    py::dict overlays;
    py::object first = py::none();
    uint64_t nonfinite_count;
    // Nothing of Python is made or dropped with a lock held.
    std::vector<Copied> tables;
    {
      std::lock_guard<std::mutex> lock(recorder.mutex);  // until all are copied: a thread that ends moves its counts
      tables.emplace_back(recorder.of_ended_threads);
      for (const auto& [number, table] : recorder.tables) {
        tables.emplace_back(*table);
      }
      nonfinite_count = recorder.nonfinite_count;
    }
    for (const Copied& table : tables) {
      for (const auto& [where, row] : table.rows) {
        counts.append(py::make_tuple(
            where.op->name, where.backward, where.module, device(where.device), dtype(where.fast), address(where.overlay),
            row.calls, row.inner_calls, dtypes(row.inputs), dtypes(row.computes), dtypes(row.outputs), seconds(row.seconds), casts(row.casts),
            row.stack == 0 ? py::object(py::none()) : stack_of(recorder, row.stack)));
      }
      for (const auto& [module, count] : table.entries) {
        entries.append(py::make_tuple(module, count));
      }
      for (const auto& [chain, count] : table.chains) {
        py::list ops;
        for (const OpInfo* op : chain.ops) {
          if (op != nullptr) {
            ops.append(op->name);
          }
        }
        chains.append(py::make_tuple(
            static_cast<int>(chain.kind), ops, address(chain.overlay), chain.module, device(chain.device), dtype(chain.fast),
            count.count, count.bytes));
      }
      for (const auto& [key, count] : table.regions) {
        const auto& [where, on, enabled, fast] = key;
        regions.append(py::make_tuple(
            where, device(on), enabled, dtype(fast), count.entries, count.unused, count.ops));
      }
      for (const auto& [key, count] : table.compiled) {
        compiled.append(py::make_tuple(key.first, key.second, count));
      }
    }
    std::vector<std::pair<const void*, py::object>> held;
    std::optional<FirstNonFinite> found;
    {
      std::lock_guard<std::mutex> lock(recorder.mutex);
      held.assign(recorder.overlays.begin(), recorder.overlays.end());
      found = recorder.first;
    }
    for (const auto& [number, overlay] : held) {
      overlays[address(number)] = overlay;
    }
    if (found) {
      first = py::make_tuple(
          found->op->name, found->backward, found->module, found->inf, found->nan, dtype(found->dtype), found->stack,
          nonfinite_count);
    }
    py::dict reading;
    reading["counts"] = counts;
    reading["entries"] = entries;
    reading["chains"] = chains;
    reading["regions"] = regions;
    reading["compiled"] = compiled;
    reading["overlays"] = overlays;
    reading["nonfinite"] = first;
    return reading;
  }

 private:
  struct Plain {
    uint64_t calls, inner_calls;
    DtypeCounts inputs, computes, outputs;
    decltype(Counts::seconds) seconds;
    CastsByKind casts;
    size_t stack;
  };

  // What a table has, without its lock.
  struct Copied {
    explicit Copied(Table& table) {
      std::lock_guard<std::mutex> lock(table.mutex);
      for (const auto& [where, each] : table.counts) {
        rows.emplace_back(
            where,
            Plain{each->calls, each->inner_calls, each->inputs, each->computes, each->outputs, each->seconds, each->casts,
                  each->stack});
      }
      entries = table.entries;
      chains = table.chains;
      regions = table.regions;
      compiled = table.compiled;
    }

    std::vector<std::pair<Where, Plain>> rows;
    decltype(Table::entries) entries;
    decltype(Table::chains) chains;
    decltype(Table::regions) regions;
    decltype(Table::compiled) compiled;
  };

  static py::object stack_of(Recorder& recorder, size_t number) {
    std::lock_guard<std::mutex> lock(recorder.mutex);
    return recorder.python_stacks[number - 1];
  }

  static py::object address(const void* of) { return py::int_(reinterpret_cast<uintptr_t>(of)); }

  static py::object device(int8_t type) {
    return type < 0 ? py::object(py::none())
                    : py::object(py::str(c10::DeviceTypeName(static_cast<DeviceType>(type), /*lower_case=*/true)));
  }

  static py::object dtype(ScalarType type) {
    return type == ScalarType::Undefined
        ? py::object(py::none())
        : py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
  }

  static py::list dtypes(const DtypeCounts& counts) {
    py::list found;
    for (const auto& [type, count] : counts) {
      found.append(py::make_tuple(dtype(type), count));
    }
    return found;
  }

  static py::list seconds(const decltype(Counts::seconds)& by_dtype) {
    py::list found;
    for (const auto& [type, sum] : by_dtype) {
      found.append(py::make_tuple(dtype(type), sum));
    }
    return found;
  }

  static py::list casts(const CastsByKind& by_kind) {
    py::list found;
    for (const CastCounts& each : by_kind) {
      found.append(py::make_tuple(
          dtype(each.source), dtype(each.target), each.of_weight, each.count, each.bytes, each.hits, each.misses, each.recasts,
          each.recast_bytes, each.seconds));
    }
    return found;
  }
};

}  // namespace
