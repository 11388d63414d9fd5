// The tensors among the arguments of a boxed call, and their casts.

#pragma once

#include <ATen/core/List.h>

#include "matching.h"

namespace {

// The arguments on the stack, and the positions of those with tensors.
class BoxedArguments {
 public:
  BoxedArguments(c10::IValue* first, const std::vector<size_t>& tensors) : first_(first), tensors_(tensors) {}

  // Call a function with the number of each argument among those with tensors, that of an item, whether it is in a list, and the item.
  template <class Function>
  void each_tensor(const Function& function) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const c10::IValue& value = first_[tensors_[i]];
      if (value.isTensor()) {
        function(i, size_t{0}, false, value.toTensor());
      } else if (value.isList()) {
        const auto items = value.toListRef();
        for (size_t j = 0; j < items.size(); ++j) {
          if (items[j].isTensor()) {
            function(i, j, true, items[j].toTensor());
          }
        }
      }
    }
  }

  template <class Spec>
  void cast_all(const Spec& all) const {
    for (size_t i = tensors_.size(); i-- > 0;) {  // in reverse: see Casts::make()
      c10::IValue& value = first_[tensors_[i]];
      if (value.isTensor()) {
        const Tensor& tensor = value.toTensor();
        if (const auto& spec = all.of(i, 0); spec.applies_to(tensor)) {
          value = cast(tensor, spec);
        }
      } else if (value.isList()) {
        auto casts = value.toList().copy();
        for (size_t j = 0; j < casts.size(); ++j) {
          const c10::IValue item = casts.get(j);
          if (const auto& spec = all.of(i, j); item.isTensor() && spec.applies_to(item.toTensor())) {
            casts.set(j, cast(item.toTensor(), spec));
          }
        }
        value = std::move(casts);
      }
    }
  }

 private:
  c10::IValue* const first_;
  const std::vector<size_t>& tensors_;
};

}  // namespace
