// The tensors among the arguments of an op, and what they are cast to.
//
// Owns the casts of a call. Locks: none.

#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "casting.h"

namespace {  // all is one unit, binding.cpp

C10_ALWAYS_INLINE bool to_be_cast(const Tensor& tensor, ScalarType dtype, DeviceType device) {
  return tensor.scalar_type() != dtype && is_eligible(tensor, device);
}

// Gathers whether the eligible inputs have different dtypes.
struct Promotion {
  DeviceType device;
  std::optional<ScalarType> seen = std::nullopt;
  bool different = false;

  void look(const Tensor& tensor) {
    if (is_eligible(tensor, device)) {
      different = different || (seen && *seen != tensor.scalar_type());
      seen = tensor.scalar_type();
    }
  }
};

// How the arguments are cast that are to be.
struct Conversion {
  ScalarType dtype;  // Undefined: nothing is cast
  DeviceType device;
  bool has_plain_keys;  // the arguments together: see Kernel::has_plain_keys()
  const DeviceRegion& region;
  const Object& is_capturing;

  C10_ALWAYS_INLINE bool changes(const Tensor& tensor) const {
    return dtype != ScalarType::Undefined && to_be_cast(tensor, dtype, device);
  }

  Tensor cast(const Tensor& tensor) const {
    return ::cast(tensor, CastTo{dtype, device, has_plain_keys}, region, is_capturing);
  }
};

// What an argument of a known signature is, where it has tensors or tells the dtype of the result.
enum class Kind : uint8_t { kTensor, kOptional, kTensors, kTensorRefs, kOptionals, kDtype, kOther };

template <class Arg>
constexpr Kind kind_of = Kind::kOther;
template <>
constexpr Kind kind_of<const Tensor&> = Kind::kTensor;
template <>
constexpr Kind kind_of<const std::optional<Tensor>&> = Kind::kOptional;
template <>
constexpr Kind kind_of<at::TensorList> = Kind::kTensors;
template <>
constexpr Kind kind_of<const at::ITensorListRef&> = Kind::kTensorRefs;
template <>
constexpr Kind kind_of<const c10::List<std::optional<Tensor>>&> = Kind::kOptionals;
template <>
constexpr Kind kind_of<std::optional<ScalarType>> = Kind::kDtype;

// The arguments of a call that are of some kind, by their addresses. What is cast is given the address of its cast.
struct Arguments {
  const Kind* kinds;
  const void** addresses;
  size_t count;
  bool begin_with_tensor;

  template <class Value>
  const Value& at(size_t i) const {
    return *static_cast<const Value*>(addresses[i]);
  }

  // Call a function with each tensor, until it says that it has seen enough.
  template <class Function>
  C10_ALWAYS_INLINE bool any_tensor(const Function& function) const {
    for (size_t i = 0; i < count; ++i) {
      bool found = false;
      switch (kinds[i]) {
        case Kind::kTensor:
          found = function(at<Tensor>(i));
          break;
        case Kind::kOptional:
          found = at<std::optional<Tensor>>(i) && function(*at<std::optional<Tensor>>(i));
          break;
        case Kind::kTensors:
          found = std::any_of(at<at::TensorList>(i).begin(), at<at::TensorList>(i).end(), function);
          break;
        case Kind::kTensorRefs:
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

// The casts that a call is given.
class Casts {
 public:
  static constexpr size_t kMost = 12;

  Casts() = default;
  Casts(const Casts&) = delete;
  ~Casts() {
    while (count_ != 0) {
      std::destroy_at(&casts_[--count_].tensor);
    }
  }

  // The last argument's is made first, as where torch's are made in a call: the weight's lies before the input's in memory, and
  // what is given back behind it can be used again. The other way round, the threads of a process took twice as much memory.
  void make(const Arguments& arguments, const Conversion& conversion) {
    for (size_t i = arguments.count; i-- > 0;) {
      const void*& address = arguments.addresses[i];
      switch (arguments.kinds[i]) {
        case Kind::kTensor:
          if (const auto& tensor = arguments.at<Tensor>(i); conversion.changes(tensor)) {
            address = &*add(conversion.cast(tensor));
          }
          break;
        case Kind::kOptional:
          if (const auto& tensor = arguments.at<std::optional<Tensor>>(i); tensor && conversion.changes(*tensor)) {
            address = &add(conversion.cast(*tensor));
          }
          break;
        case Kind::kTensors:
          address = &add(arguments.at<at::TensorList>(i), conversion).list;
          break;
        case Kind::kTensorRefs:
          address = &add(arguments.at<at::ITensorListRef>(i), conversion).refs;
          break;
        default:
          break;
      }
    }
  }

 private:
  union Cast {
    Cast() {}
    ~Cast() {}
    std::optional<Tensor> tensor;
  };

  struct List {
    std::vector<Tensor> tensors;
    at::TensorList list;
    at::ITensorListRef refs;
    std::unique_ptr<List> before;
  };

  std::optional<Tensor>& add(Tensor cast) { return *std::construct_at(&casts_[count_++].tensor, std::move(cast)); }

  template <class Tensors>
  const List& add(const Tensors& tensors, const Conversion& conversion) {
    auto list = std::make_unique<List>();
    for (const Tensor& tensor : tensors) {
      list->tensors.push_back(conversion.changes(tensor) ? conversion.cast(tensor) : tensor);
    }
    list->list = list->tensors;
    list->refs = list->list;
    list->before = std::move(lists_);
    lists_ = std::move(list);
    return *lists_;
  }

  size_t count_ = 0;
  std::unique_ptr<List> lists_;
  std::array<Cast, kMost> casts_;  // as many as are counted
};

}  // namespace
