// Converts a recorder's counts to Python objects; see the rows in observe/recorder.py.
//
// Locks: those of the recorder and its records. None is held while Python may run: an allocation may start a collection.

#pragma once

#include "nonfinite.h"
#include "python.h"
#include "recorder.h"

namespace {

// The functions below return new references.

template <class Rows, class Convert>
PyObject* list_of(const Rows& rows, Convert convert) {
  Object list = Object::steal(PyList_New(0));
  for (const auto& row : rows) {
    const Object item = Object::steal(convert(row));
    if (PyList_Append(list.get(), item.get()) != 0) {
      throw_python_error();
    }
  }
  return list.release();
}

PyObject* address_of(const void* of) { return PyLong_FromVoidPtr(const_cast<void*>(of)); }

PyObject* device_name(int8_t type) {
  return type < 0 ? Py_NewRef(Py_None)
                  : Py_BuildValue("s", c10::DeviceTypeName(static_cast<DeviceType>(type), /*lower_case=*/true).c_str());
}

PyObject* dtypes_of(const DtypeCounts& counts) {
  return list_of(counts, [](const auto& each) {
    return Py_BuildValue("(OL)", python_dtype(each.dtype), static_cast<long long>(each.sum));
  });
}

PyObject* row_of_cast(const CastCounts& cast, bool timing) {
  return Py_BuildValue(
      "(OONKKKKKKd)", python_dtype(cast.source), python_dtype(cast.target), PyBool_FromLong(cast.of_weight), cast.count, cast.bytes,
      cast.hits, cast.misses, cast.recasts, cast.recast_bytes, timing ? cast.seconds : 0.0);
}

PyObject* row_of_source(const SourceCounts& source) {
  return Py_BuildValue(
      "(ziOONOKKKK)", source.op == nullptr ? nullptr : source.op->name.c_str(), source.module, python_dtype(source.dtype),
      python_dtype(source.cast), PyBool_FromLong(source.is_first), python_dtype(source.asked_from), source.count, source.bytes,
      source.casts, source.cast_bytes);
}

PyObject* stack_of(Recorder& recorder, size_t number) {
  if (number == 0) {
    return Py_NewRef(Py_None);
  }
  std::lock_guard<std::mutex> lock(recorder.mutex);
  return Py_NewRef(recorder.python_stacks[number - 1].get());
}

PyObject* row_of_op(Recorder& recorder, const CallKey& key, const CallCounts& counts) {
  // If only another recorder asks for times, ops are timed but these are not returned.
  const decltype(counts.seconds) none;
  PyObject* const seconds = list_of(recorder.timing ? counts.seconds : none, [](const auto& each) {
    return Py_BuildValue("(Od)", python_dtype(each.dtype), each.sum);
  });
  PyObject* const casts = list_of(counts.casts, [&](const auto& cast) { return row_of_cast(cast, recorder.timing); });
  const char* const recipe = key.outcome == nullptr ? nullptr : key.outcome->first.c_str();
  const char* const declined = key.outcome == nullptr ? nullptr : key.outcome->second.c_str();
  return Py_BuildValue(
      "(sNiNONzzKKdNNNNNNNN)", key.op->name.c_str(), PyBool_FromLong(key.backward), key.module, device_name(key.device),
      python_dtype(key.fast), address_of(key.override), recipe, declined, counts.calls, counts.inner_calls, counts.flops,
      list_of(counts.rows, [](const auto& each) { return Py_BuildValue("(sLKd)", each.kind, static_cast<long long>(each.rows), each.calls, each.flops); }),
      dtypes_of(counts.inputs),
      dtypes_of(counts.computes), dtypes_of(counts.outputs), seconds, casts, stack_of(recorder, counts.stack),
      list_of(counts.sources, &row_of_source));
}

PyObject* row_of_chain(const Chain& chain, const ChainCounts& counts) {
  std::vector<const OpInfo*> ops(chain.ops.begin(), std::find(chain.ops.begin(), chain.ops.end(), nullptr));
  return Py_BuildValue(
      "(iNNiNOiKKK)", static_cast<int>(chain.kind), list_of(ops, [](const OpInfo* op) { return Py_BuildValue("s", op->name.c_str()); }),
      address_of(chain.override), chain.module, device_name(chain.device), python_dtype(chain.fast), chain.consumer, counts.count,
      counts.bytes, counts.casts);
}

PyObject* row_of_region(const RegionKey& key, const RegionCounts& counts) {
  return Py_BuildValue(
      "(sNNNOKKKK)", key.call_site.c_str(), PyBool_FromLong(key.by_module_rule), device_name(key.device), PyBool_FromLong(key.enabled),
      python_dtype(key.dtype), counts.entries, counts.unused, counts.ops, counts.compiled);
}

PyObject* row_of_nonfinite(const FirstNonFinite& first, uint64_t count) {
  return Py_BuildValue(
      "(sNiNNOOK)", first.op->name.c_str(), PyBool_FromLong(first.backward), first.module, PyBool_FromLong(first.inf),
      PyBool_FromLong(first.nan), python_dtype(first.dtype), first.stack.get(), count);
}

// Return the events and how many were dropped. Called with the GIL held.
PyObject* read_events(Recorder& recorder) {
  const auto [events, dropped] = recorder.events.copy();
  return Py_BuildValue("(NK)", list_of(events, [&](const Event& event) {
    const long long began = recorder.events.since_1970(event.begin);
    return Py_BuildValue(
        "(NsLLKiNOONNK)", PyBool_FromLong(event.is_cast), event.op->name.c_str(), began,
        static_cast<long long>(recorder.events.since_1970(event.end)) - began, event.thread, event.module,
        PyBool_FromLong(event.backward), python_dtype(event.source), python_dtype(event.dtype), PyBool_FromLong(event.of_weight),
        PyBool_FromLong(event.is_hit), event.bytes);
  }), dropped);
}

// Return what torch's ops counted: underflowed, overflowed, zeroed, nonfinite and amax. Waits for the device.
NumericsCounts read_device(const CountsOnDevice& sum) {
  const Unobserved unobserved;
  if (sum.stream) {
    sum.stream->synchronize();
  }
  const Tensor numbers = sum.counts.cpu();
  const auto* const each = numbers.const_data_ptr<int64_t>();
  NumericsCounts counts;
  counts.underflowed = each[0];
  counts.overflowed = each[1];
  counts.zeroed = each[2];
  counts.nonfinite = each[3];
  counts.amax = sum.amax.item<double>();
  return counts;
}

PyObject* row_of_numerics(const NumericsKey& key, NumericsCounts counts) {
  for (const CountsOnDevice& sum : counts.on_devices) {
    counts.add_numbers(read_device(sum));
  }
  return Py_BuildValue(
      "(sNisOOKdKKKK)", key.op->name.c_str(), PyBool_FromLong(key.backward), key.module, kValuesOf[static_cast<size_t>(key.of)],
      python_dtype(key.source), python_dtype(key.dtype), counts.count, counts.amax, counts.underflowed, counts.overflowed,
      counts.zeroed, counts.nonfinite);
}

PyObject* dict_of(const std::unordered_map<const void*, Object>& overrides) {
  Object dict = Object::steal(PyDict_New());
  for (const auto& [address, override] : overrides) {
    const Object key = Object::steal(address_of(address));
    if (PyDict_SetItem(dict.get(), key.get(), override.get()) != 0) {
      throw_python_error();
    }
  }
  return dict.release();
}

// Return the counts of a recorder. Called with the GIL held.
PyObject* read(Recorder& recorder) {
  Totals totals;
  decltype(recorder.overrides) overrides;
  std::optional<FirstNonFinite> first;
  uint64_t nonfinite_count;
  {
    std::lock_guard<std::mutex> lock(recorder.mutex);  // for all records together: a thread that ends moves its counts
    const auto add = [&totals](ThreadRecord& record) {
      std::lock_guard<std::mutex> of_thread(record.mutex);
      totals.add(record.totals);
    };
    add(recorder.of_ended_threads);
    for (const auto& [thread, record] : recorder.records) {
      add(*record);
    }
    nonfinite_count = recorder.nonfinite_count;
  }
  PyObject* const counts = list_of(totals.ops, [&](const auto& each) { return row_of_op(recorder, each.first, *each.second); });
  {
    std::lock_guard<std::mutex> lock(recorder.mutex);
    overrides = recorder.overrides;
    first = recorder.first;
  }
  const auto row = [](auto convert) { return [convert](const auto& each) { return convert(each.first, each.second); }; };
  return Py_BuildValue(
      "{sNsNsNsNsNsNsNsN}", "counts", counts, "entries",
      list_of(totals.entries, row([](int module, uint64_t count) { return Py_BuildValue("(iK)", module, count); })), "chains",
      list_of(totals.chains, row(&row_of_chain)), "regions",
      list_of(totals.regions, row(&row_of_region)), "compiled",
      list_of(totals.compiled, row([](const auto& key, uint64_t count) {
        return Py_BuildValue("(siK)", key.first.c_str(), key.second, count);
      })),
      "numerics", list_of(totals.numerics, row(&row_of_numerics)), "overrides", dict_of(overrides), "nonfinite", first ? row_of_nonfinite(*first, nonfinite_count) : Py_NewRef(Py_None));
}

}  // namespace
