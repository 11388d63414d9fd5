// Converts a recorder's counts to the rows of observe/recorder.py.
//
// Locks: those of the recorder and its records. None is held while Python may run: an allocation may start a collection.

#pragma once

#include "nonfinite.h"
#include "python.h"
#include "recorder.h"

namespace {

// The classes of rows, by name. Set by bind(); it lives as long as the process.
PyObject* row_classes = nullptr;

// The functions below return new references.

PyObject* to_python(bool value) { return PyBool_FromLong(value); }
PyObject* to_python(int value) { return PyLong_FromLong(value); }
PyObject* to_python(int64_t value) { return PyLong_FromLongLong(value); }
PyObject* to_python(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }
PyObject* to_python(double value) { return PyFloat_FromDouble(value); }
PyObject* to_python(const char* text) { return text == nullptr ? Py_NewRef(Py_None) : PyUnicode_FromString(text); }
PyObject* to_python(const std::string& text) { return PyUnicode_FromString(text.c_str()); }
PyObject* to_python(ScalarType dtype) { return Py_NewRef(python_dtype(dtype)); }
PyObject* to_python(const OpInfo* op) { return to_python(op == nullptr ? nullptr : op->name.c_str()); }
PyObject* to_python(const Object& object) { return Py_NewRef(object.get()); }
PyObject* to_python(PyObject* created) { return created; }

PyObject* device_name(int8_t type) {
  return type < 0 ? Py_NewRef(Py_None) : to_python(c10::DeviceTypeName(static_cast<DeviceType>(type), /*lower_case=*/true));
}

PyObject* address_of(const void* of) { return PyLong_FromVoidPtr(const_cast<void*>(of)); }

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

struct Field {
  template <class Value>
  Field(const char* name, const Value& value)
      : name(Object::steal(PyUnicode_InternFromString(name))), value(Object::steal(to_python(value))) {}

  Object name, value;
};

// Make a row of a class in recorder.py.
PyObject* make_row(const char* type, std::initializer_list<Field> fields) {
  static PyObject* const nothing = PyTuple_New(0);
  const Object named = Object::steal(PyDict_New());
  for (const Field& field : fields) {
    if (PyDict_SetItem(named.get(), field.name.get(), field.value.get()) != 0) {
      throw_python_error();
    }
  }
  return Object::steal(PyObject_Call(PyDict_GetItemString(row_classes, type), nothing, named.get())).release();
}

PyObject* dtypes_of(const DtypeCounts& counts) {
  return list_of(counts, [](const auto& each) { return Py_BuildValue("(ON)", python_dtype(each.dtype), to_python(each.sum)); });
}

PyObject* row_of_cast(const CastCounts& cast, bool timing) {
  return make_row(
      "CastRow", {{"source", cast.source}, {"target", cast.target}, {"of_weight", cast.of_weight}, {"count", cast.count},
                  {"bytes", cast.bytes}, {"hits", cast.hits}, {"misses", cast.misses}, {"recasts", cast.recasts},
                  {"recast_bytes", cast.recast_bytes}, {"seconds", timing ? cast.seconds : 0.0}});
}

PyObject* row_of_source(const SourceCounts& source) {
  return make_row(
      "SourceRow", {{"op", source.op}, {"module", source.module}, {"dtype", source.dtype}, {"cast", source.cast},
                    {"is_first", source.is_first}, {"asked_from", source.asked_from}, {"count", source.count}, {"bytes", source.bytes},
                    {"casts", source.casts}, {"cast_bytes", source.cast_bytes}});
}

PyObject* row_of_matmul(const MatmulRows& matmul) {
  return make_row("MatmulRow", {{"kind", matmul.kind}, {"rows", matmul.rows}, {"calls", matmul.calls}, {"flops", matmul.flops}});
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
  const auto seconds = [](const auto& each) { return Py_BuildValue("(Od)", python_dtype(each.dtype), each.sum); };
  return make_row(
      "CountRow", {{"op", key.op}, {"backward", key.backward}, {"module", key.module}, {"device", device_name(key.device)},
                   {"fast", key.fast}, {"override", address_of(key.override)},
                   {"recipe", key.outcome == nullptr ? nullptr : key.outcome->first.c_str()},
                   {"declined", key.outcome == nullptr ? nullptr : key.outcome->second.c_str()}, {"calls", counts.calls},
                   {"inner_calls", counts.inner_calls}, {"flops", counts.flops}, {"matmuls", list_of(counts.rows, &row_of_matmul)},
                   {"inputs", dtypes_of(counts.inputs)}, {"computes", dtypes_of(counts.computes)},
                   {"outputs", dtypes_of(counts.outputs)}, {"seconds", list_of(recorder.timing ? counts.seconds : none, seconds)},
                   {"casts", list_of(counts.casts, [&](const auto& cast) { return row_of_cast(cast, recorder.timing); })},
                   {"stack", stack_of(recorder, counts.stack)}, {"sources", list_of(counts.sources, &row_of_source)}});
}

PyObject* row_of_chain(const Chain& chain, const ChainCounts& counts) {
  const std::vector<const OpInfo*> ops(chain.ops.begin(), std::find(chain.ops.begin(), chain.ops.end(), nullptr));
  return make_row(
      "ChainRow", {{"kind", static_cast<int>(chain.kind)}, {"ops", list_of(ops, [](const OpInfo* op) { return to_python(op); })},
                   {"override", address_of(chain.override)}, {"module", chain.module}, {"device", device_name(chain.device)},
                   {"fast", chain.fast}, {"consumer", chain.consumer}, {"count", counts.count}, {"bytes", counts.bytes},
                   {"casts", counts.casts}});
}

PyObject* row_of_region(const RegionKey& key, const RegionCounts& counts) {
  return make_row(
      "RegionRow", {{"call_site", key.call_site}, {"by_module_rule", key.by_module_rule}, {"device", device_name(key.device)},
                    {"enabled", key.enabled}, {"dtype", key.dtype}, {"entries", counts.entries}, {"unused", counts.unused},
                    {"ops", counts.ops}, {"compiled", counts.compiled}});
}

PyObject* row_of_nonfinite(const FirstNonFinite& first, uint64_t count) {
  return make_row(
      "NonFiniteRow", {{"op", first.op}, {"backward", first.backward}, {"module", first.module}, {"inf", first.inf}, {"nan", first.nan},
                       {"dtype", first.dtype}, {"stack", first.stack}, {"count", count}});
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
  return make_row(
      "NumericsRow", {{"op", key.op}, {"backward", key.backward}, {"module", key.module}, {"of", kValuesOf[static_cast<size_t>(key.of)]},
                      {"source", key.source}, {"dtype", key.dtype}, {"count", counts.count}, {"amax", counts.amax},
                      {"underflowed", counts.underflowed}, {"overflowed", counts.overflowed}, {"zeroed", counts.zeroed},
                      {"nonfinite", counts.nonfinite}});
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
  const auto entry = [](int module, uint64_t count) { return Py_BuildValue("(iK)", module, count); };
  const auto calls = [](const auto& key, uint64_t count) { return Py_BuildValue("(siK)", key.first.c_str(), key.second, count); };
  return Py_BuildValue(
      "{sNsNsNsNsNsNsNsN}", "counts", counts, "entries", list_of(totals.entries, row(entry)), "chains",
      list_of(totals.chains, row(&row_of_chain)), "regions", list_of(totals.regions, row(&row_of_region)), "compiled",
      list_of(totals.compiled, row(calls)), "numerics", list_of(totals.numerics, row(&row_of_numerics)), "overrides",
      dict_of(overrides), "nonfinite", first ? row_of_nonfinite(*first, nonfinite_count) : Py_NewRef(Py_None));
}

}  // namespace
