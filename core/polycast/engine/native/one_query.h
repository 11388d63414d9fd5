// Attention with a single query for each head on the CPU, as a decoder computes it for each token. For one row torch's kernel is slow: in bfloat16 it
// takes three times as long as for two. Where heads share keys it computes each head alone, though their queries are rows of one product.
// So the query is given several rows here, also in code that is compiled in a region with a recipe or policies: in others, code is shared with torch.autocast.

#pragma once

namespace {

// Set by bind().
PyObject* is_exporting = nullptr;

// Sizes may be symbolic: those that cannot be compared yet count as different.
bool are_equal(const c10::SymInt& one, const c10::SymInt& other) { return TORCH_GUARD_OR_FALSE(one.sym_eq(other)); }

bool has_elements(const Tensor& tensor) { return TORCH_GUARD_OR_FALSE(tensor.sym_numel().sym_gt(0)); }

// Return the attention by an op of an extension, which takes the arguments without casts; undefined without one, or where torch's way is as good.
Tensor attention_of_extension(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout, bool is_causal,
    std::optional<double> scale, bool shares_keys) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool, ScalarType);
  const auto op = c10::Dispatcher::singleton().findSchema({"polycast::attend_one_query", ""});
  return !op || !query.is_cpu() ? Tensor() : op->typed<Signature>().redispatch(
      c10::DispatchKeySet(DispatchKey::CPU), query, key, value, mask, dropout, is_causal, scale, shares_keys, at::autocast::get_autocast_dtype(at::kCPU));
}

// Return a query of several rows, whose attention has that of one row for `of_one_query`; undefined where torch's way is as good.
Tensor rows_of_query(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout, bool is_causal,
    std::optional<double>, bool shares_keys) {
  if (!query.is_cpu() || query.dim() != 4 || key.dim() != 4 || value.dim() != 4 || !are_equal(query.sym_size(2), 1) || is_causal || dropout != 0 ||
      (mask && (mask->dim() != 4 || !are_equal(mask->sym_size(2), 1)))) {
    return {};
  }
  const bool are_batches = has_elements(query) && has_elements(key) && are_equal(query.sym_size(0), key.sym_size(0)) &&
      std::equal(key.sym_sizes().begin(), key.sym_sizes().begin() + 3, value.sym_sizes().begin(), &are_equal);  // torch broadcasts others
  if (!are_batches) {
    return {};
  }
  const c10::SymInt batches = query.sym_size(0), heads = query.sym_size(1), shared = key.sym_size(1);
  if (are_equal(heads, shared)) {
    return query.scalar_type() == at::kBFloat16 ? query.expand({-1, -1, 2, -1}).contiguous() : Tensor();
  }
  const bool is_grouped = shares_keys && are_equal(heads % shared, 0) && (!mask || are_equal(mask->sym_size(1), 1));
  return is_grouped ? query.reshape_symint({batches, shared, heads / shared, query.sym_size(3)}) : Tensor();
}

// Return the attention of one query from that of the rows.
Tensor of_one_query(const Tensor& query, const Tensor& attention) {
  const bool is_twice = are_equal(query.sym_size(1), attention.sym_size(1));
  return is_twice ? attention.slice(2, 0, 1).contiguous()
                  : attention.reshape_symint({query.sym_size(0), query.sym_size(1), 1, attention.sym_size(3)});
}

// If an op is attention, and faster by rows, compute it from the arguments on the stack, and return true; otherwise change nothing.
bool attend_by_rows(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  if (handle.operator_name() != c10::OperatorName("aten::scaled_dot_product_attention", "")) {
    return false;
  }
  if (const Gil gil; is_true(call(is_exporting))) {
    return false;  // programs have torch's op
  }
  c10::IValue* const arguments = stack->data() + stack->size() - handle.schema().arguments().size();
  const Tensor query = arguments[0].toTensor();
  const Tensor rows = rows_of_query(
      query, arguments[1].toTensor(), arguments[2].toTensor(), arguments[3].toOptional<Tensor>(), arguments[4].toDouble(), arguments[5].toBool(),
      std::nullopt, arguments[7].toBool());
  if (!rows.defined()) {
    return false;
  }
  arguments[0] = rows;
  handle.callBoxed(stack);
  stack->back() = of_one_query(query, stack->back().toTensor());
  return true;
}

}  // namespace
