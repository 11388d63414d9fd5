// The traits of ops, by their schemas.
//
// Owns the traits of each op that was seen, for as long as the process lives: counts refer to them. Locks: a mutex of its own.

#pragma once

#include "counts.h"
#include "flops.h"

namespace {

// Return whether a value of a type is a tensor or holds one, as far as the type says.
bool may_have_tensor(const c10::Type& type) {
  const auto contained = type.containedTypes();
  return type.kind() == c10::TypeKind::TensorType || type.kind() == c10::TypeKind::AnyType || type.hasFreeVariables() ||
      std::any_of(contained.begin(), contained.end(), [](const auto& each) { return may_have_tensor(*each); });
}

class OpInfos {
 public:
  static OpInfos& all() {
    static auto* const only = new OpInfos();
    return *only;
  }

  // Return the op of an event; null: the event is not of an op.
  const OpInfo* of(const at::RecordFunction& event) {
    const auto schema = event.operator_schema();
    if (!schema) {
      return nullptr;
    }
    std::string name = c10::toString(schema->operator_name());
    std::lock_guard<std::mutex> lock(mutex_);
    auto& info = infos_[name];
    if (info == nullptr) {
      info = std::make_unique<OpInfo>();
      info->arguments = schema->arguments().size();
      info->returns = schema->returns().size();
      for (size_t i = 0; i < info->arguments; ++i) {
        const auto* const alias = schema->arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite()) {
          info->written.push_back(i);
          if (schema->arguments()[i].is_out()) {
            info->out.push_back(i);
          }
        }
      }
      const auto is_or_has_tensor = [](const c10::Argument& each) { return may_have_tensor(*each.type()); };
      info->has_tensors = std::any_of(schema->arguments().begin(), schema->arguments().end(), is_or_has_tensor) ||
          std::any_of(schema->returns().begin(), schema->returns().end(), is_or_has_tensor);
      const std::string base = schema->name();
      const auto has = [&base](const char* part) { return base.find(part) != std::string::npos; };
      info->has_uninitialized_output = has("empty") || has("::resize") || has("::set_");
      info->flops = formula_of(base);
      info->converts = base == "aten::to" || base == "aten::type_as" || has("_to_copy");
      info->multiplies = base == "aten::mm" || base == "aten::bmm";
      info->copies = info->converts || has("::clone") || has("::contiguous");
      info->moves = info->copies || base == "aten::copy_";
      info->is_loss = has("_loss") || has("::binary_cross_entropy") || has("::kl_div");
      info->name = std::move(name);
    }
    return info.get();
  }

  // Return an entry with a name alone, for an autograd node.
  const OpInfo* named(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& info = infos_[name];
    if (info == nullptr) {
      info = std::make_unique<OpInfo>();
      info->name = name;
    }
    return info.get();
  }

  std::mutex& mutex() { return mutex_; }

  // Changes when an op is deregistered: another one may be registered under its name.
  static inline std::atomic<uint64_t> generation{0};

 private:
  class Listener final : public c10::OpRegistrationListener {
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle& op) override { all().forget(c10::toString(op.operator_name())); }
  };

  OpInfos() : listening_(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>())) {}

  void forget(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = infos_.find(name);
    if (found != infos_.end()) {
      deregistered_.push_back(std::move(found->second));  // counts refer to it
      infos_.erase(found);
      ++generation;
    }
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<OpInfo>> infos_;
  std::vector<std::unique_ptr<OpInfo>> deregistered_;
  c10::RegistrationHandleRAII listening_;
};

}  // namespace
