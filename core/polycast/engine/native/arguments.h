// The tensors among the arguments of a call with a known signature, and their casts.

#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>

#include <forward_list>

#include "casting.h"

namespace {

// The arguments that a kernel reads: those with tensors, and the dtype of the result. kWritten: a tensor that is never cast.
enum class ArgumentKind : uint8_t { kTensor, kWritten, kOptional, kTensors, kTensorRefs, kOptionals, kDtype, kOther };

template <class Arg>
constexpr ArgumentKind kind_of = ArgumentKind::kOther;
template <>
constexpr ArgumentKind kind_of<const Tensor&> = ArgumentKind::kTensor;
template <>
constexpr ArgumentKind kind_of<Tensor&> = ArgumentKind::kWritten;
template <>
constexpr ArgumentKind kind_of<const std::optional<Tensor>&> = ArgumentKind::kOptional;
template <>
constexpr ArgumentKind kind_of<at::TensorList> = ArgumentKind::kTensors;
template <>
constexpr ArgumentKind kind_of<const at::ITensorListRef&> = ArgumentKind::kTensorRefs;
template <>
constexpr ArgumentKind kind_of<const c10::List<std::optional<Tensor>>&> = ArgumentKind::kOptionals;
template <>
constexpr ArgumentKind kind_of<std::optional<ScalarType>> = ArgumentKind::kDtype;

// The addresses of these arguments, first of all with tensors. That of a cast one is replaced by the address of the cast.
struct Arguments {
  const ArgumentKind* kinds;
  const void** addresses;
  size_t count;

  template <class Value>
  const Value& at(size_t i) const {
    return *static_cast<const Value*>(addresses[i]);
  }

  // Call a function with each tensor until it returns true; return whether it did.
  template <class Function>
  C10_ALWAYS_INLINE bool any_tensor(const Function& function) const {
    for (size_t i = 0; i < count; ++i) {
      bool found = false;
      switch (kinds[i]) {
        case ArgumentKind::kTensor:
        case ArgumentKind::kWritten:
          found = function(at<Tensor>(i));
          break;
        case ArgumentKind::kOptional:
          found = at<std::optional<Tensor>>(i) && function(*at<std::optional<Tensor>>(i));
          break;
        case ArgumentKind::kTensors:
          found = std::any_of(at<at::TensorList>(i).begin(), at<at::TensorList>(i).end(), function);
          break;
        case ArgumentKind::kTensorRefs:
          found = std::any_of(at<at::ITensorListRef>(i).begin(), at<at::ITensorListRef>(i).end(), function);
          break;
        default:
          break;
      }
      if (found) {
        return true;
      }
    }
    return false;
  }
};

// Owns the casts of a call.
class Casts {
 public:
  static constexpr size_t kMax = 12;

  // Cast the last argument first, as torch does: then the weight's cast lies before the input's in memory, and what is freed
  // behind it can be reused. In the other order the threads of a process took twice as much memory.
  template <class Spec>
  void make(const Arguments& arguments, const Spec& all) {
    for (size_t i = arguments.count; i-- > 0;) {
      const void*& address = arguments.addresses[i];
      const auto& spec = all.of(i, 0);
      switch (arguments.kinds[i]) {
        case ArgumentKind::kTensor:
          if (const auto& tensor = arguments.at<Tensor>(i); spec.applies_to(tensor)) {
            address = &*add(cast(tensor, spec));
          }
          break;
        case ArgumentKind::kOptional:
          if (const auto& tensor = arguments.at<std::optional<Tensor>>(i); tensor && spec.applies_to(*tensor)) {
            address = &add(cast(*tensor, spec));
          }
          break;
        case ArgumentKind::kTensors:
          address = &add(arguments.at<at::TensorList>(i), all, i).list;
          break;
        case ArgumentKind::kTensorRefs:
          address = &add(arguments.at<at::ITensorListRef>(i), all, i).refs;
          break;
        default:
          break;
      }
    }
  }

 private:
  struct List {
    std::vector<Tensor> tensors;
    at::TensorList list;
    at::ITensorListRef refs;
  };

  std::optional<Tensor>& add(Tensor cast) { return casts_.emplace_back(std::move(cast)); }

  template <class Tensors, class Spec>
  const List& add(const Tensors& tensors, const Spec& all, size_t argument) {
    List& list = lists_.emplace_front();
    for (const Tensor& tensor : tensors) {
      const auto& spec = all.of(argument, list.tensors.size());
      list.tensors.push_back(spec.applies_to(tensor) ? cast(tensor, spec) : tensor);
    }
    list.list = list.tensors;
    list.refs = list.list;
    return list;
  }

  std::forward_list<List> lists_;
  c10::SmallVector<std::optional<Tensor>, kMax> casts_;  // never more, so that references to them stay valid
};

}  // namespace
