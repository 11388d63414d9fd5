// MATCH: cast the operands of a call whose dtypes torch would refuse. Read policy/matching.py first: it is the same in Python.

#pragma once

#include <torch/csrc/Layout.h>

#include "casting.h"

namespace {

// The letter of a dtype in policy/matching.py.
char letter_of(ScalarType dtype) { return dtype == at::kFloat ? 'f' : dtype == at::kBFloat16 ? 'b' : dtype == at::kHalf ? 'h' : '?'; }

// The dtypes that torch's kernels of an op accept: a row of the table in matching.py.
struct MatchedOperands {
  std::vector<std::string> names, scalars, mixtures;
  bool fills_masks = false;  // with one mask, one value of any dtype
  bool takes_empty = false;  // tensors without elements, in any dtype
};

// A set of dtypes.
struct Dtypes {
  static_assert(c10::NumScalarTypes <= 64);
  uint64_t bits = 0;

  C10_ALWAYS_INLINE bool has(ScalarType dtype) const { return (bits >> static_cast<int>(dtype) & 1) != 0; }
  C10_ALWAYS_INLINE bool has_several() const { return (bits & (bits - 1)) != 0; }

  // Add a dtype, or those of an argument's tensors. That of an undefined tensor is Undefined.
  C10_ALWAYS_INLINE void add(ScalarType dtype) { bits |= uint64_t{1} << static_cast<int>(dtype); }
  C10_ALWAYS_INLINE void add(const Tensor& tensor) { add(tensor.scalar_type()); }
  C10_ALWAYS_INLINE void add(const std::optional<Tensor>& tensor) { tensor ? add(*tensor) : void(); }
  template <class Argument>
  C10_ALWAYS_INLINE void add(const Argument& argument) {
    if constexpr (std::is_same_v<Argument, at::TensorList> || std::is_same_v<Argument, at::ITensorListRef>) {
      std::for_each(argument.begin(), argument.end(), [this](const Tensor& tensor) { add(tensor); });
    }
  }
};

const Dtypes kFloatingPoint = [] {
  Dtypes found;
  for (int i = 0; i < c10::NumScalarTypes; ++i) {
    if (const auto dtype = static_cast<ScalarType>(i); c10::isFloatingType(dtype)) {
      found.add(dtype);
    }
  }
  return found;
}();

// The dtypes that the device has no kernels for: those of the op, and those for tensors in a layout.
struct MissingKernels {
  Dtypes of_op;
  std::vector<std::pair<c10::Layout, Dtypes>> of_layouts;

  bool has(c10::Layout layout, ScalarType dtype) const {
    return C10_UNLIKELY(layout != c10::kStrided) && std::any_of(of_layouts.begin(), of_layouts.end(), [&](const auto& each) {
      return each.first == layout && each.second.has(dtype);
    });
  }
};

// The operands of an op. Arguments are numbered among those that have tensors.
class Matching {
 public:
  Matching(const MatchedOperands& operands, Dtypes missing, const c10::FunctionSchema& schema)
      : operands(operands), missing(missing), by_item(schema.name().starts_with("aten::_foreach_")) {
    const auto has = [](const auto& names, const std::string& name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    for (const c10::Argument& argument : schema.arguments()) {
      if (argument.real_type()->str().find("Tensor") != std::string::npos) {
        const auto* const alias = argument.alias_info();
        arguments.push_back(
            {operands.names.empty() || has(operands.names, argument.name()), has(operands.scalars, argument.name()),
             alias != nullptr && alias->isWrite()});
      }
    }
  }

  struct Argument {
    bool is_operand;
    bool may_differ_as_scalar;  // if it has no dimensions
    bool is_written;            // so the others are cast to its dtype
  };

  // Return whether torch may refuse tensors of some dtypes: of several floating-point ones, or of one that it has no kernel for.
  C10_ALWAYS_INLINE bool may_refuse(Dtypes dtypes) const {
    const Dtypes floats{dtypes.bits & kFloatingPoint.bits};
    return floats.has_several() || (floats.bits & missing.bits) != 0;
  }

  const MatchedOperands& operands;
  std::vector<Argument> arguments;
  Dtypes missing;  // that torch has no kernels for
  bool by_item;    // whether the items of lists must agree one by one
};

// The dtype that a tensor is cast to; Undefined: it is not cast.
struct MatchSpec {
  ScalarType dtype;

  bool applies_to(const Tensor& tensor) const { return dtype != ScalarType::Undefined && tensor.scalar_type() != dtype; }
};

Tensor cast(const Tensor& tensor, const MatchSpec& spec) {
  if (C10_UNLIKELY(observed_op != nullptr)) {
    return observed_cast(*observed_op, tensor, [&](SeenCast&) { return tensor.to(spec.dtype); });
  }
  return tensor.to(spec.dtype);
}

// The specification for an op that writes to a tensor, which is not cast, and for LOWER_FIRST.
struct SelectedCasts {
  static constexpr size_t kAll = SIZE_MAX;

  const CastSpec& of_cast;
  const CastSpec& of_others;
  const Matching& matching;
  size_t only;  // the argument that is cast, or kAll

  const CastSpec& of(size_t argument, size_t) const {
    return (only == kAll || only == argument) && !matching.arguments[argument].is_written ? of_cast : of_others;
  }
};

// The operands of one call, and the dtypes that they are cast to.
class Match {
 public:
  Match(const Matching& matching, DeviceType device) : matching_(matching), device_(device) {}

  // Add a tensor of the call, an item of an argument.
  void add(size_t argument, size_t item, bool is_in_list, const Tensor& tensor) {
    const Matching::Argument& role = matching_.arguments[argument];
    if (matching_.operands.fills_masks && tensor.defined()) {
      indices_ += role.is_operand ? 0 : 1;
      masks_ += tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte ? 1 : 0;
      is_one_value_ |= argument + 1 == matching_.arguments.size() && tensor.is_cpu() && tensor.sym_numel() == 1;
    }
    if (!tensor.defined() || !role.is_operand || (matching_.by_item && !is_in_list) || (role.may_differ_as_scalar && tensor.dim() == 0) ||
        tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return;
    }
    const ScalarType dtype = tensor.scalar_type();
    is_empty_ |= matching_.operands.takes_empty && has_no_elements(tensor);
    const bool is_number = tensor.is_cpu() && tensor.dim() == 0;  // it may be an operand beside tensors of any device
    tensors_.push_back({item, argument, dtype, is_fast_or_float32(dtype) && (is_number || is_eligible(tensor, device_)), role.is_written});
  }

  // Find the casts; return whether there are any.
  bool decide() {
    if (indices_ == 1 && masks_ == 1 && is_one_value_) {
      return false;
    }
    const auto before = [](const Added& a, const Added& b) { return std::tie(a.item, a.argument) < std::tie(b.item, b.argument); };
    std::sort(tensors_.begin(), tensors_.end(), before);
    bool is_any_cast = false;
    for (auto *begin = tensors_.begin(), *end = begin; begin != tensors_.end(); begin = end) {
      end = matching_.by_item ? std::find_if(begin, tensors_.end(), [&](const Added& each) { return each.item != begin->item; }) : tensors_.end();
      if (const ScalarType target = target_of(begin, end); target != ScalarType::Undefined) {
        is_any_cast = true;
        std::for_each(begin, end, [&](Added& each) { each.target = each.is_eligible ? target : ScalarType::Undefined; });
      }
    }
    return is_any_cast;
  }

  // Return the cast of an item of an argument.
  MatchSpec of(size_t argument, size_t item) const {
    const auto wanted = std::tie(item, argument);
    const auto* const found = std::lower_bound(
        tensors_.begin(), tensors_.end(), wanted, [](const Added& each, const auto& key) { return std::tie(each.item, each.argument) < key; });
    return {found != tensors_.end() && std::tie(found->item, found->argument) == wanted ? found->target : ScalarType::Undefined};
  }

 private:
  struct Added {
    size_t item, argument;
    ScalarType dtype;
    bool is_eligible, is_written;
    ScalarType target = ScalarType::Undefined;
  };

  static bool has_no_elements(const Tensor& tensor) {
    const auto sizes = tensor.sym_sizes();
    return std::any_of(sizes.begin(), sizes.end(), [](const c10::SymInt& size) { return size.maybe_as_int() == int64_t{0}; });
  }

  // Return the dtype to cast operands to; Undefined if torch accepts theirs, or a cast would not help.
  ScalarType target_of(const Added* begin, const Added* end) const {
    Dtypes floats;
    ScalarType written = ScalarType::Undefined;
    for (const Added* each = begin; each != end; ++each) {
      const bool is_float = c10::isFloatingType(each->dtype);
      const bool is_second = each->is_written && written != ScalarType::Undefined && written != each->dtype;
      if (is_float ? !each->is_eligible || is_second : each->is_written) {
        return ScalarType::Undefined;
      }
      written = each->is_written ? each->dtype : written;
      if (is_float) {
        floats.add(each->dtype);
      }
    }
    if (!matching_.may_refuse(floats) || (is_empty_ && !floats.has_several()) || torch_takes(begin, end)) {
      return ScalarType::Undefined;
    }
    return written == ScalarType::Undefined ? at::kFloat : written;
  }

  // Return whether torch accepts the mixture; see _LETTERS in matching.py.
  bool torch_takes(const Added* begin, const Added* end) const {
    if (matching_.operands.mixtures.empty()) {
      return false;
    }
    std::string exact;
    for (size_t argument = 0; argument < matching_.arguments.size(); ++argument) {
      if (matching_.arguments[argument].is_operand) {
        const auto* const first = std::find_if(begin, end, [&](const Added& each) { return each.argument == argument; });
        exact += first == end ? '-' : letter_of(first->dtype);
      }
    }
    std::string short_form = exact;
    if ((exact.find('b') == std::string::npos) != (exact.find('h') == std::string::npos)) {
      std::replace_if(short_form.begin(), short_form.end(), [](char letter) { return letter == 'b' || letter == 'h'; }, 'x');
    }
    return std::any_of(matching_.operands.mixtures.begin(), matching_.operands.mixtures.end(), [&](const std::string& taken) {
      return taken == exact || taken == short_form;
    });
  }

  const Matching& matching_;
  const DeviceType device_;
  int indices_ = 0, masks_ = 0;
  bool is_one_value_ = false, is_empty_ = false;
  c10::SmallVector<Added, 8> tensors_;  // sorted by decide()
};

PyObject* note_match = nullptr;  // a function of Python that is called with an op and a device

// Return whether MATCH casts now: in regions of polycast, not in torch's own. A backward pass and a traced graph count as the former: they may
// run the ops of a region of polycast in one of torch's. Python is told where it runs at each op anyway.
bool matches_here(int64_t op, DeviceType device) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    const Gil gil;
    const std::string name = c10::DeviceTypeName(device, /*lower_case=*/true);
    call(note_match, "Ls", static_cast<long long>(op), name.c_str());
    return true;
  }
  return region_of(device).innermost != nullptr || torch::autograd::get_current_graph_task_id() >= 0;
}

}  // namespace
