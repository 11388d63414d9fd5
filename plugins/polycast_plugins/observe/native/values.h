// The tensors among the arguments and results of ops.

#pragma once

#include "tensors.h"

namespace {

template <class Each>
void each_tensor(const c10::IValue& value, const Each& each) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.defined()) {
      each(tensor);
    }
  } else if (value.isList()) {
    const auto items = value.toListRef();
    if (!items.empty() && (items.front().isTensor() || value.isOptionalTensorList())) {
      for (const c10::IValue& item : items) {
        if (item.isTensor() && item.toTensor().defined()) {
          each(item.toTensor());
        }
      }
    }
  }
}

template <class Storages>
bool has_storage_among(const Storages& storages, const Tensor& tensor) {
  return tensor.has_storage() && std::find(storages.begin(), storages.end(), storage_of(tensor)) != storages.end();
}

bool is_fast(ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

}  // namespace
