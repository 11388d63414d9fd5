// Attention by one query for each head on the CPU, as a decoder computes it for each token. For one row torch's kernel is slow: in bfloat16 it
// takes three times as long as for two. Where heads share keys it computes each head alone, though their queries are rows of one product.

#pragma once

namespace {

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
  const bool are_batches = query.is_cpu() && query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.numel() > 0 && key.numel() > 0 &&
      query.size(0) == key.size(0) && key.sizes().slice(0, 3) == value.sizes().slice(0, 3);  // torch broadcasts others
  if (!are_batches || query.size(2) != 1 || is_causal || dropout != 0 || (mask && (mask->dim() != 4 || mask->size(2) != 1))) {
    return {};
  }
  const int64_t batches = query.size(0), heads = query.size(1), shared = key.size(1);
  if (heads == shared) {
    return query.scalar_type() == at::kBFloat16 ? query.expand({-1, -1, 2, -1}).contiguous() : Tensor();
  }
  const bool is_grouped = shares_keys && heads % shared == 0 && (!mask || mask->size(1) == 1);
  return is_grouped ? query.reshape({batches, shared, heads / shared, query.size(3)}) : Tensor();
}

// Return the attention of one query from that of the rows.
Tensor of_one_query(const Tensor& query, const Tensor& attention) {
  const bool is_twice = query.size(1) == attention.size(1);
  return is_twice ? attention.slice(2, 0, 1).contiguous() : attention.reshape({query.size(0), query.size(1), 1, attention.size(3)});
}

}  // namespace
