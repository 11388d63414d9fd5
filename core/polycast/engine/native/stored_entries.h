// The functions by which Python lists the entries of a user store, and adds entries that were made earlier.

#pragma once

#include "casting.h"
#include "user_store.h"

namespace {

// Return sizes, strides and offset of the view that a stamp was taken of; the offset is that from the weight's.
Object python_view(const VersionStamp& stamp, const Tensor& weight) {
  const auto bytes = static_cast<const char*>(stamp.data()) - static_cast<const char*>(weight.const_data_ptr());
  const Object sizes = python_numbers(stamp.sizes()), strides = python_numbers(stamp.strides());
  const auto offset = static_cast<long long>(bytes / static_cast<int64_t>(weight.element_size()));
  return Object::steal(Py_BuildValue("(OOL)", sizes.get(), strides.get(), offset));
}

// Return the fields of a StoredEntry, or an empty object if the entry is stale.
Object python_entry(const UserStore::Stored& stored) {
  const Object object = call(stored.reference.get());
  if (object.is_none()) {
    return {};
  }
  const Tensor weight = tensor_of(object.get());
  const VersionStamp& stamp = stored.entry->stamp;
  const bool is_view = stored.key.view != 0;
  if (!(is_view ? stamp.matches_version(weight) : stamp.matches(weight)) || !stored.entry->is_unwritten()) {
    return {};
  }
  const Object view = is_view ? python_view(stamp, weight) : Object::borrow(Py_None);
  const Object kind = stored.key.prepack_id != 0 ? Object::steal(PyLong_FromLong(stored.key.prepack_id))
                                                   : Object::borrow(python_dtype(stored.key.dtype));
  const Object parts = python_tensors(stored.entry->tensors);
  return Object::steal(PyTuple_Pack(4, object.get(), view.get(), kind.get(), parts.get()));
}

// entries() -> the fields of each StoredEntry
PyObject* store_entries(PyObject* self, PyObject*) {
  Object list = Object::steal(PyList_New(0));
  for (const UserStore::Stored& stored : Holder<UserStore>::unwrap(self)->entries()) {
    const Object entry = python_entry(stored);
    if (entry && PyList_Append(list.get(), entry.get()) != 0) {
      throw_python_error();
    }
  }
  return list.release();
}

// adopt(tensor, kind, tensors) -> whether the entry was added; None if it never will be: the tensor is no weight, or there is no room
PyObject* store_adopt(PyObject* self, PyObject* arguments) {
  PyObject *tensor_object, *kind, *parts;
  parse(arguments, "OOO", &tensor_object, &kind, &parts);
  const std::shared_ptr<UserStore> store = Holder<UserStore>::unwrap(self);
  const Tensor tensor = tensor_of(tensor_object);
  const int prepack_id = PyLong_Check(kind) ? static_cast<int>(PyLong_AsLong(kind)) : 0;
  const Tensor* const found_weight = weight_of(tensor, /*for_prepacking=*/prepack_id != 0);
  if (found_weight == nullptr) {
    return Py_NewRef(Py_None);
  }
  const Tensor weight = *found_weight;
  const Source source(tensor, weight);
  const Key key = source.key(prepack_id != 0 ? ScalarType::Undefined : dtype_of(kind), prepack_id);
  Tensors tensors;
  for (const Tensor& part : convert_items(parts, &tensor_of)) {
    tensors.push_back(part);
  }
  std::optional<bool> is_added;
  {
    const WithoutGil others_may_run;
    is_added = store->adopt(source, key, std::move(tensors));
  }
  return is_added ? PyBool_FromLong(*is_added ? 1 : 0) : Py_NewRef(Py_None);
}

}  // namespace
