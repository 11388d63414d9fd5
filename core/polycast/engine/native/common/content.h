// What tells that a weight is still what it was.
//
// Owns nothing but weak references: to a weight, so that its address, which is the key, is not given to another tensor, and
// to its storage, for freed memory may be given to another storage. Locks: none.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <functional>

#include "tensors.h"

namespace {

// Of a cast of a weight; of what it was packed into, which has no dtype, the kind of packing.
struct Key {
  TensorImpl* weight;
  ScalarType dtype;
  int packing = 0;
  bool operator==(const Key& other) const {
    return weight == other.weight && dtype == other.dtype && packing == other.packing;
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<void*>()(key.weight) * 31 + static_cast<size_t>(key.dtype) + static_cast<size_t>(key.packing) * 1021;
  }
};

// What a weight was when a cast of it was made.
//
// What can make a kept cast wrong, and what sees it:
//   an in-place op, an optimizer's step, load_state_dict    the version
//   weight.data = ..., set_, resize_                        the storage, the address, sizes and strides
//   either of these while it is cast                        this is made before the cast is
//   another tensor at the address of a dead one             the weak references
//   ops that write and count no version                     writes.h
//   memory that another process writes                      is_shared(): no cast of it is kept
//   a buffer that a weight is a part of, as a whole         is_part_of_a_buffer(): a user's store keeps none of it
//   a write through .data, NumPy, DLPack, a raw pointer     nothing; WeightCache(verify=True) finds it
//
// And of the cast itself:
//   who was given it writes it                              its version: is_unwritten()
//   a stream that has not seen it made, or uses it longer   the streams that may use it; share_between()
class Content {
 public:
  explicit Content(const Tensor& weight)
      : weight_(weight.getIntrusivePtr()),
        storage_(weight.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
        data_(weight.const_data_ptr()),
        version_(weight._version()),
        sizes_and_strides_(weight.sizes()) {
    const auto strides = weight.strides();
    sizes_and_strides_.append(strides.begin(), strides.end());
  }

  // Whether a weight, whose key this is found by, is what it was.
  bool is_that_of(const Tensor& weight) const {
    const TensorImpl* const impl = weight.unsafeGetTensorImpl();
    const auto sizes = impl->sizes(), strides = impl->strides();
    return version_ == impl->version_counter().current_version() && data_ == impl->data() &&
        storage_._unsafe_get_target() == storage_of(weight) && sizes_and_strides_.size() == 2 * sizes.size() &&
        std::equal(sizes.begin(), sizes.end(), sizes_and_strides_.begin()) &&
        std::equal(strides.begin(), strides.end(), sizes_and_strides_.begin() + sizes.size());
  }

  const StorageImpl* storage() const { return storage_._unsafe_get_target(); }
  bool weight_is_alive() const { return weight_.use_count() > 0; }

 private:
  c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl> weight_;
  c10::weak_intrusive_ptr<StorageImpl> storage_;
  const void* data_;
  uint32_t version_;
  c10::SmallVector<int64_t, 8> sizes_and_strides_;
};

}  // namespace
