// Counts the casts that observed ops need, and finds the chains of ops that they end.
//
// Locks: none. The GIL is taken as in nonfinite.h.

#pragma once

#include "numerics.h"
#include "values.h"
#include "thread_state.h"

namespace {

// Find the chain that the cast of an activation ends.
void find_chain(ObservedOp& op, const Tensor& tensor, ScalarType target, uint64_t bytes) {
  Producer* const producer = op.state->producers.find(tensor);
  if (producer == nullptr) {
    return;
  }
  if (is_fast(target) && producer->computes == at::kFloat) {
    op.cast_down = true;
    if (producer->fast_before != nullptr) {
      const uint64_t is_first_cast = !std::exchange(producer->is_noted, true);
      const Chain chain{
          .kind = ChainKind::kUnlistedFloat32, .ops = {producer->fast_before, producer->op, op.op}, .override = producer->override,
          .device = producer->device, .fast = target};
      op.chains.push_back({chain, {.count = is_first_cast, .bytes = is_first_cast * 2 * bytes, .casts = 1}, producer->modules});
    }
  } else if (target == at::kFloat && producer->cast_down) {
    const Chain chain{
        .kind = ChainKind::kRoundTrip, .ops = {producer->op, op.op}, .override = op.override, .device = op.device,
        .fast = tensor.scalar_type()};
    op.chains.push_back({chain, {.count = 1, .bytes = bytes, .casts = 1}, std::nullopt});
  }
}

// Called by the engine.
void note_cast(ObservedCall& call, const Tensor& tensor, const Tensor& cast, const SeenCast& seen) {
  using Unchanged = CastWeights::Unchanged;
  auto& op = static_cast<ObservedOp&>(call);
  CastCounts counts{tensor.scalar_type(), cast.scalar_type(), seen.of_weight};
  counts.seconds = op.is_timed ? seen.seconds : 0;
  const bool may_be_unchanged = seen.of_weight && counts.target != at::kFloat && seen.is_new;
  const Unchanged unchanged = may_be_unchanged ? op.state->weights.note(tensor, cast) : Unchanged::kNothing;
  if (!seen.is_new || (seen.in_torchs_region && unchanged == Unchanged::kCast)) {
    counts.hits = 1;
  } else {
    counts.count = 1;
    counts.bytes = bytes_of(cast);
    counts.misses = seen.looked_for;
    counts.recasts = unchanged != Unchanged::kNothing;
    counts.recast_bytes = counts.recasts * counts.bytes;
  }
  op.casts.add(counts);
  for (ObservedOp* outer = op.outer; outer != nullptr && counts.target == at::kFloat; outer = outer->outer) {
    outer->cast_inside = true;
  }
  if (op.numerics != nullptr) {
    count_cast(op, tensor, cast, seen.of_weight, counts.count != 0);
  }
  for (Input& input : op.sources) {
    if (input.tensor == tensor.unsafeGetTensorImpl() && input.source.cast == ScalarType::Undefined) {
      input.source.cast = counts.target;
      input.source.casts = counts.count;
      input.source.cast_bytes = counts.bytes;
      break;
    }
  }
  if (!op.backward && !seen.of_weight) {
    find_chain(op, tensor, counts.target, bytes_of(cast));
  }
}

}  // namespace
