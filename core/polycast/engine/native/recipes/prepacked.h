// Prepacked weights: whether what is prepacked of a weight may be cached, and the function by which Python gets it.

#pragma once

#include "autocast.h"
#include "casting.h"
#include "user_store.h"

namespace {

// The reasons of NOT_PREPACKED in recipes/prepacking.py, in its order, which bind() checks.
enum class NotPrepacked : long { kIntercepted, kNoWeight, kNotCached, kWrittenUnseen, kNoRoom, kViewsAreFull };
constexpr std::array<const char*, 6> kNotPrepackedNames = {
    "INTERCEPTED", "NO_WEIGHT", "NOT_CACHED", "WRITTEN_UNSEEN", "NO_ROOM", "VIEWS_ARE_FULL"};

// Return the weight that a tensor is or is a view of, if what is prepacked of the tensor may be cached; else null, with the reason.
const Tensor* weight_to_prepack(const Tensor& tensor, NotPrepacked& reason) {
  if (!caching_is_safe()) {
    reason = NotPrepacked::kIntercepted;
    return nullptr;
  }
  const Tensor* const weight = weight_of(tensor, /*for_prepacking=*/true);
  if (weight == nullptr) {
    reason = NotPrepacked::kNoWeight;
    return nullptr;
  }
  if (!at::autocast::is_autocast_cache_enabled()) {
    reason = NotPrepacked::kNotCached;
    return nullptr;
  }
  return weight;
}

PyObject* python_reason(NotPrepacked reason) { return PyLong_FromLong(static_cast<long>(reason)); }

// Return a prepacked weight as a tuple, or None for a weight that cannot be prepacked.
PyObject* python_prepacked(const Tensors& parts) {
  return parts.empty() ? Py_NewRef(Py_None) : python_tensors(parts).release();
}

// Prepack a weight and insert the result into the store. Returns as prepacked().
PyObject* make_prepacked(UserStore& store, const Source& source, int prepack_id, PyObject* prepack, PyObject* weight) {
  only<PendingCollectives>().drop_finished();  // a finished one holds the memory of its weights until then
  const uint64_t position = only<InvalidationLog>().length();
  VersionStamp stamp(source.tensor);
  if (!user_store_allows(source.weight, stamp)) {
    return python_reason(NotPrepacked::kWrittenUnseen);
  }
  UserStore::Room room;
  {
    const WithoutGil others_may_run;
    room = store.room_for_prepacked(source, prepack_id);
  }
  if (room != UserStore::Room::kEnough) {
    return python_reason(room == UserStore::Room::kTooLittle ? NotPrepacked::kNoRoom : NotPrepacked::kViewsAreFull);
  }
  Object made;
  {
    const ReadGuard reading(source.weight);
    made = call(prepack, "(O)", weight);
  }
  Tensors parts;
  if (!made.is_none()) {
    for (const Tensor& part : convert_items(made.get(), &tensor_of)) {
      parts.push_back(part);
    }
  }
  {
    const WithoutGil others_may_run;
    store.insert_prepacked(source, prepack_id, std::move(stamp), std::move(parts), position);
  }
  return made.release();
}

// prepacked(store, weight, prepack_id, prepack) -> the prepacked weight, from a store or new; a NotPrepacked if it could not be cached,
// in which case it is not made. See StateMachine in engine/state.py.
PyObject* prepacked(PyObject*, PyObject* arguments) {
  PyObject *store_object, *weight_object, *prepack;
  int prepack_id;
  parse(arguments, "OOiO", &store_object, &weight_object, &prepack_id, &prepack);
  const std::shared_ptr<UserStore> store = Holder<UserStore>::unwrap(store_object);
  const Tensor tensor = tensor_of(weight_object);
  NotPrepacked reason;
  const Tensor* const found_weight = weight_to_prepack(tensor, reason);
  if (found_weight == nullptr) {
    return python_reason(reason);
  }
  const Tensor weight = *found_weight;
  const Source source(tensor, weight);
  std::optional<Tensors> cached;
  {
    const WithoutGil others_may_run;
    cached = store->find_prepacked(source, prepack_id);
  }
  return cached ? python_prepacked(*cached) : make_prepacked(*store, source, prepack_id, prepack, weight_object);
}

}  // namespace
