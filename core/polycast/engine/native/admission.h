// Admission: whether a cast of a weight may be cached, and whether a cached one may be used.
//
// A user store (WeightCache) holds a cast only while every write of the weight is seen, so it refuses weights whose memory has
// holders that count no versions. A region must never be more stale than torch's: torch caches casts of weights that require
// grad, whatever is written, and no others. So a region caches those too, and casts of frozen weights and of views only while
// nothing else holds the memory.

#pragma once

#include <ATen/MapAllocator.h>

#include "invalidation.h"
#include "python.h"
#include "version_stamp.h"

namespace {

// Set by bind().
c10::DeleterFnPtr storage_part_deleter = nullptr;  // of a part of a storage, as files are read and mapped
PyObject* storages_are_rewritten = nullptr;        // see casts/weights.py

// The owner of a storage's memory, which tells who can write it other than through a tensor: nobody if it is torch's, this process if it
// is foreign (of a NumPy array, say), and other processes, too, if it is shared.
enum class Memory : uint8_t { kTorch, kForeign, kShared };

// Return the owner of a weight's memory. Takes the GIL, and may run Python, unless the memory is torch's or mapped by torch.
Memory memory_of(const Tensor& weight) {
  const c10::Storage& storage = weight.unsafeGetTensorImpl()->unsafe_storage();
  const c10::DataPtr& data = storage.data_ptr();
  if (!weight.device().is_cpu() || data.get_deleter() == c10::GetAllocator(c10::DeviceType::CPU)->raw_deleter()) {
    return Memory::kTorch;
  }
  if (const auto* const mapped = at::MapAllocator::fromDataPtr(data)) {
    const bool is_shared = (mapped->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) != 0;
    return is_shared ? Memory::kShared : Memory::kTorch;
  }
  const Gil gil;
  const Object object = Object::steal(torch::createPyObject(storage));
  if (is_true(Object::steal(PyObject_CallMethod(object.get(), "is_shared", nullptr)))) {
    return Memory::kShared;
  }
  return data.get_deleter() == storage_part_deleter ? Memory::kTorch : Memory::kForeign;
}

// Return whether a weight may be written at any time without notice: by other processes, by a collective, or by FSDP, which
// gathers weights into memory that it holds. May run Python.
bool is_written_elsewhere(const Tensor& weight, const VersionStamp& stamp) {
  if (memory_of(weight) == Memory::kShared || only<PendingCollectives>().may_write(storage_of(weight))) {
    return true;
  }
  if (stamp.holders() == Holders::kNone) {
    return false;
  }
  const Gil gil;
  return is_true(call(storages_are_rewritten));
}

// Return whether a user store may cache what is made of a weight after the stamp was taken. May run Python.
bool user_store_allows(const Tensor& weight, const VersionStamp& stamp) {
  return stamp.holders() != Holders::kUnversioned && !is_written_elsewhere(weight, stamp);
}

// Whether a region admits one cast: to its cache, and to be used from there.
struct RegionAdmission {
  bool sees_all_writes;  // at admission, nothing else held the memory

  RegionAdmission(const Tensor& weight, const VersionStamp& stamp, bool for_view) {
    const bool is_sole_holder = for_view ? stamp.holders() == Holders::kVersioned && count_holders(weight) == 2
                                         : stamp.holders() == Holders::kNone;
    sees_all_writes = is_sole_holder && memory_of(weight) == Memory::kTorch;
  }

  // Return whether a cast of the weight, or of a view of it, may be cached and, if it is cached, whether it may be used.
  // (An alias that is made later drops the cast, unless C++ makes it.)
  bool allows(const Tensor& weight, bool for_view) const {
    return (sees_all_writes && count_holders(weight) == (for_view ? 2 : 1)) || (weight.requires_grad() && !for_view);
  }
};

}  // namespace
