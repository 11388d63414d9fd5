// What a recorder has counted, as Python objects; see Reading in observer/recorder.py.
//
// Owns nothing. Locks: those of the recorder and its tables, one at a time, and never while Python may run: what it allocates may
// begin a collection, which may run anything.

#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "python.h"
#include "recorder.h"

namespace {

// What a recorder has counted, for Python; called with the GIL held.
class Reading {
 public:
  static PyObject* of(Recorder& recorder) {
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
    List counts, entries, chains, matmuls, regions, compiled;
    for (const Copied& table : tables) {
      for (const auto& [where, row] : table.rows) {
        counts.add(Py_BuildValue(
            "(sNiNONKKNNNNNNN)", where.op->name.c_str(), PyBool_FromLong(where.backward), where.module, device(where.device),
            python_dtype(where.fast), address(where.override), row.calls, row.inner_calls, dtypes(row.inputs), dtypes(row.computes),
            dtypes(row.outputs), seconds(recorder, row.seconds), casts(recorder, row.casts), stack_of(recorder, row.stack).release(),
            sources(row.sources)));
      }
      for (const auto& [module, count] : table.entries) {
        entries.add(Py_BuildValue("(iK)", module, count));
      }
      for (const auto& [chain, count] : table.chains) {
        List ops;
        for (const OpInfo* op : chain.ops) {
          if (op != nullptr) {
            ops.add(Py_BuildValue("s", op->name.c_str()));
          }
        }
        chains.add(Py_BuildValue(
            "(iNNiNOiKKK)", static_cast<int>(chain.kind), ops.release(), address(chain.override), chain.module, device(chain.device),
            python_dtype(chain.fast), chain.consumer, count.count, count.bytes, count.casts));
      }
      for (const auto& [matmul, count] : table.matmuls) {
        const auto text = [&matmul](std::string Outcome::*part) {
          return matmul.outcome == nullptr ? nullptr : (matmul.outcome->*part).c_str();
        };
        matmuls.add(Py_BuildValue(
            "(sNiNONzzKd)", matmul.op->name.c_str(), PyBool_FromLong(matmul.backward), matmul.module, device(matmul.device),
            python_dtype(matmul.fast), address(matmul.override), text(&Outcome::first), text(&Outcome::second), count.calls,
            count.flops));
      }
      for (const auto& [key, count] : table.regions) {
        regions.add(Py_BuildValue(
            "(sNNNOKKKK)", key.call_site.c_str(), PyBool_FromLong(key.by_module_rule), device(key.device), PyBool_FromLong(key.enabled),
            python_dtype(key.dtype), count.entries, count.unused, count.ops, count.compiled));
      }
      for (const auto& [key, count] : table.compiled) {
        compiled.add(Py_BuildValue("(siK)", key.first.c_str(), key.second, count));
      }
    }
    std::vector<std::pair<const void*, Object>> held;
    std::optional<FirstNonFinite> found;
    {
      std::lock_guard<std::mutex> lock(recorder.mutex);
      held.assign(recorder.overrides.begin(), recorder.overrides.end());
      found = recorder.first;
    }
    Object overrides = Object::made(PyDict_New());
    for (const auto& [number, override] : held) {
      const Object key = Object::made(address(number));
      if (PyDict_SetItem(overrides.get(), key.get(), override.get()) != 0) {
        raise();
      }
    }
    PyObject* const first = found
        ? Py_BuildValue(
              "(sNiNNOOK)", found->op->name.c_str(), PyBool_FromLong(found->backward), found->module, PyBool_FromLong(found->inf),
              PyBool_FromLong(found->nan), python_dtype(found->dtype), found->stack.get(), nonfinite_count)
        : Py_NewRef(Py_None);
    return Py_BuildValue(
        "{sNsNsNsNsNsNsNsN}", "counts", counts.release(), "entries", entries.release(), "chains", chains.release(), "matmuls",
        matmuls.release(), "regions", regions.release(), "compiled", compiled.release(), "overrides", overrides.release(), "nonfinite", first);
  }

 private:
  struct Plain {
    uint64_t calls, inner_calls;
    DtypeCounts inputs, computes, outputs;
    decltype(Counts::seconds) seconds;
    CastsByKind casts;
    size_t stack;
    Sources sources;
  };

  // What a table has, without its lock.
  struct Copied {
    explicit Copied(Table& table) {
      std::lock_guard<std::mutex> lock(table.mutex);
      for (const auto& [where, each] : table.counts) {
        rows.emplace_back(
            where,
            Plain{each->calls, each->inner_calls, each->inputs, each->computes, each->outputs, each->seconds, each->casts,
                  each->stack, each->sources});
      }
      entries = table.entries;
      chains = table.chains;
      matmuls = table.matmuls;
      regions = table.regions;
      compiled = table.compiled;
    }

    std::vector<std::pair<Where, Plain>> rows;
    decltype(Table::entries) entries;
    decltype(Table::chains) chains;
    decltype(Table::matmuls) matmuls;
    decltype(Table::regions) regions;
    decltype(Table::compiled) compiled;
  };

  // A list in Python.
  class List {
   public:
    List() : list_(Object::made(PyList_New(0))) {}

    // Takes a new reference; null: making it has raised.
    void add(PyObject* item) {
      const Object added = Object::made(item);
      if (PyList_Append(list_.get(), added.get()) != 0) {
        raise();
      }
    }

    PyObject* release() { return list_.release(); }

   private:
    Object list_;
  };

  // Below: new references.
  static Object stack_of(Recorder& recorder, size_t number) {
    if (number == 0) {
      return Object::of(Py_None);
    }
    std::lock_guard<std::mutex> lock(recorder.mutex);
    return recorder.python_stacks[number - 1];
  }

  static PyObject* address(const void* of) { return PyLong_FromVoidPtr(const_cast<void*>(of)); }

  static PyObject* device(int8_t type) {
    return type < 0 ? Py_NewRef(Py_None)
                    : Py_BuildValue("s", c10::DeviceTypeName(static_cast<DeviceType>(type), /*lower_case=*/true).c_str());
  }

  static PyObject* dtypes(const DtypeCounts& counts) {
    List found;
    for (const auto& [type, count] : counts) {
      found.add(Py_BuildValue("(OL)", python_dtype(type), static_cast<long long>(count)));
    }
    return found.release();
  }

  // None where they are not asked for: those of the ops during which another observer had times taken.
  static PyObject* seconds(const Recorder& recorder, const ByDtype<double>& by_dtype) {
    List found;
    if (!recorder.timing) {
      return found.release();
    }
    for (const auto& [type, sum] : by_dtype) {
      found.add(Py_BuildValue("(Od)", python_dtype(type), sum));
    }
    return found.release();
  }

  static PyObject* sources(const Sources& sources) {
    List found;
    for (const SourceCounts& each : sources) {
      found.add(Py_BuildValue(
          "(ziOONOKKKK)", each.op == nullptr ? nullptr : each.op->name.c_str(), each.module, python_dtype(each.dtype),
          python_dtype(each.cast), PyBool_FromLong(each.is_first), python_dtype(each.asked_from), each.count, each.bytes,
          each.casts, each.cast_bytes));
    }
    return found.release();
  }

  static PyObject* casts(const Recorder& recorder, const CastsByKind& by_kind) {
    List found;
    for (const CastCounts& each : by_kind) {
      found.add(Py_BuildValue(
          "(OONKKKKKKd)", python_dtype(each.source), python_dtype(each.target), PyBool_FromLong(each.of_weight), each.count,
          each.bytes, each.hits, each.misses, each.recasts, each.recast_bytes,
          recorder.timing ? each.seconds : 0.0));
    }
    return found.release();
  }
};

}  // namespace
