// What Python has decided for the calls of a thread that a recipe may compute, by the metadata of their arguments.
//
// Each thread has a table of its own, so that nothing is locked. It holds no Python objects, and is emptied when it is full and when
// anything changes that decisions depend on: kernels, registered policies, operators, or whether anyone listens.

#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include "casting.h"
#include "user_store.h"

namespace {

// An Action of recipes/actions.py. Immutable.
struct Action {
  // The numbers of recipes/actions.py, which bind() checks.
  static constexpr int kCachedCast = 0, kAsItIs = -1;  // the operator takes the cached cast, or the weight itself
  static constexpr std::array<const char*, 2> kPrepackNames = {"AS_IT_IS", "CACHED_CAST"};
  enum class Kind : long { kDeclined, kFloat32, kOperator };
  static constexpr std::array<const char*, 3> kKindNames = {"DECLINED", "FLOAT32", "OPERATOR"};

  Kind kind;
  size_t weight = 0;
  int prepack_id = kCachedCast;
  std::optional<c10::OperatorHandle> op;
  size_t parts = 0;  // how many tensors it takes of the weight
  std::vector<c10::IValue> constants;
  c10::SmallVector<size_t, 2> floats;  // the positions of integers that it takes as floating-point numbers
  std::weak_ptr<UserStore> process_store;
};

// All that an action may depend on: the key of a call, of which every word is compared.
class CallMetadata {
 public:
  bool records = false;         // whether autograd records the call
  bool has_fast_or_float32 = true;  // whether all tensors are float32, bfloat16 or float16

  // in_function: whether an autograd.Function runs, forward or backward.
  CallMetadata(const DeviceRegion& region, DeviceType device, int64_t op, bool in_function) {
    push(static_cast<int64_t>(region.override->id) | static_cast<int64_t>(in_function) << 61);
    push(op << 32 | static_cast<int64_t>(device) << 16 | static_cast<int64_t>(at::autocast::get_autocast_dtype(device)) << 8 |
        (region.store != nullptr ? 1 : 0) | (at::autocast::is_autocast_cache_enabled() ? 2 : 0) |
        (at::globalContext().userEnabledFlashSDP() ? 4 : 0));
    push(at::get_num_threads());
  }

  // Return false if an argument has metadata that are not compared, or forward-mode AD tracks it.
  bool add(const c10::IValue& argument) {
    if (argument.isTensor()) {
      return add_tensor(argument.toTensor());
    }
    if (argument.isNone() || argument.isBool()) {
      push(argument.isNone() ? kNone : argument.toBool() ? kTrue : kFalse);
    } else if (argument.isInt()) {
      push(kInt, argument.toInt());
    } else if (argument.isDouble()) {
      int64_t bits;
      const double number = argument.toDouble();
      std::memcpy(&bits, &number, sizeof bits);
      push(kDouble, bits);
    } else if (argument.isIntList()) {
      const at::DimVector numbers = argument.toDimVector();
      push(kInts, static_cast<int64_t>(numbers.size()));
      words_.append(numbers.begin(), numbers.end());
    } else if (argument.isString()) {
      const c10::string_view text = argument.toStringView();
      push(kString, static_cast<int64_t>(text.size()));
      words_.append(text.begin(), text.end());
    } else {
      return false;
    }
    return true;
  }

  void finish() {
    words_[0] |= static_cast<int64_t>(records) << 62;
    for (const int64_t word : words_) {
      hash_ = mixed(hash_, word);
    }
  }

  uint64_t hash() const { return hash_; }
  at::ArrayRef<int64_t> words() const { return words_; }

 private:
  enum Tag : int64_t { kUndefined, kTensor, kNone, kTrue, kFalse, kInt, kDouble, kInts, kString };

  bool add_tensor(const Tensor& tensor) {
    if (!tensor.defined()) {
      push(kUndefined);
      return true;
    }
    const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
    if (has_tangent(meta)) {
      return false;
    }
    const bool needs_gradient = grad_enabled_ && meta != nullptr && tensor.requires_grad();
    records = records || needs_gradient;
    const ScalarType dtype = tensor.scalar_type();
    has_fast_or_float32 = has_fast_or_float32 && is_fast_or_float32(dtype);
    const Tensor* const weight = weight_of(tensor, /*for_prepacking=*/true);
    // 0: of no weight, 1: all of a weight, 2: a part of one
    const int64_t part = weight == nullptr ? 0 : weight == &tensor || covers(tensor, *weight) ? 1 : 2;
    const int64_t index = tensor.get_device() + 1;  // 0 where devices have no index
    push(kTensor | static_cast<int64_t>(dtype) << 8 | part << 16 | static_cast<int64_t>(needs_gradient) << 18 | index << 24 |
        tensor.dim() << 40);
    words_.append(tensor.sizes().begin(), tensor.sizes().end());
    words_.append(tensor.strides().begin(), tensor.strides().end());
    return true;
  }

  void push(int64_t word) { words_.push_back(word); }

  void push(Tag tag, int64_t value) {
    push(tag);
    push(value);
  }

  const bool grad_enabled_ = at::GradMode::is_enabled();
  c10::SmallVector<int64_t, 40> words_;
  uint64_t hash_ = 0;
};

// The decisions for the calls of one thread.
class Decisions {
 public:
  static Decisions& of_thread() {
    thread_local Decisions decisions;
    return decisions;
  }

  // Forget the decisions for all threads.
  static void forget_all() { current_epoch.fetch_add(1, std::memory_order_release); }

  // Return a number that increases when decisions are forgotten. Read it before Python decides.
  static uint64_t epoch() { return current_epoch.load(std::memory_order_acquire); }

  std::shared_ptr<const Action> find(const CallMetadata& call) {
    if (const uint64_t now = epoch(); C10_UNLIKELY(epoch_ != now)) {
      actions_.clear();
      epoch_ = now;
    }
    const auto found = actions_.find(call.hash());
    return found != actions_.end() && at::ArrayRef<int64_t>(found->second.words) == call.words() ? found->second.action : nullptr;
  }

  void keep(const CallMetadata& call, std::shared_ptr<const Action> action, uint64_t epoch) {
    if (epoch != epoch_) {  // it was decided before a change
      return;
    }
    if (actions_.size() >= kMax) {
      actions_.clear();
    }
    actions_[call.hash()] = {call.words().vec(), std::move(action)};
  }

 private:
  static constexpr size_t kMax = 2048;

  struct Decision {
    std::vector<int64_t> words;
    std::shared_ptr<const Action> action;
  };

  static inline constinit std::atomic<uint64_t> current_epoch{1};

  std::unordered_map<uint64_t, Decision> actions_;  // by hash; of two calls with one hash, the last
  uint64_t epoch_ = 0;
};

}  // namespace
