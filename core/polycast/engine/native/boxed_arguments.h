// The tensors among the arguments of a boxed call, and their casts.

#pragma once

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include "casting.h"
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
      } else if (value.isTensorList()) {
        c10::List<Tensor> casts;
        for (const Tensor& tensor : value.toTensorVector()) {
          const auto& spec = all.of(i, casts.size());
          casts.push_back(spec.applies_to(tensor) ? cast(tensor, spec) : tensor);
        }
        value = std::move(casts);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> casts;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          const auto& spec = all.of(i, casts.size());
          casts.push_back(tensor && spec.applies_to(*tensor) ? cast(*tensor, spec) : tensor);
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
