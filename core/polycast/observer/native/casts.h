// Casts that observed ops needed, made by kernels of either engine, and what they say of the ops before.
//
// Owns nothing. Locks: none.

#pragma once

#include <optional>
#include <utility>

#include "nonfinite.h"
#include "values.h"
#include "watch.h"

namespace {

// Note what the cast of an activation says of the ops before.
void note_chain(ObservedOp& op, const Tensor& tensor, ScalarType target, uint64_t bytes) {
  Producer* const producer = op.watch->producers.find(tensor);
  if (producer == nullptr) {
    return;
  }
  if (is_fast(target) && producer->computes == at::kFloat) {
    op.cast_down = true;
    if (producer->fast_before != nullptr) {
      const uint64_t is_first_cast = !std::exchange(producer->is_noted, true);
      op.chains.push_back(
          {Chain{ChainKind::kUnlistedFloat32, {producer->fast_before, producer->op, op.op}, producer->override, kNoModule,
                 producer->device, target},
           {is_first_cast, is_first_cast * 2 * bytes, 1}, producer->modules});
    }
  } else if (target == at::kFloat && producer->cast_down) {
    op.chains.push_back(
        {Chain{ChainKind::kRoundTrip, {producer->op, op.op}, op.override, kNoModule, op.device, tensor.scalar_type()},
         {1, bytes, 1}, std::nullopt});
  }
}

// Called where an observed op needs a cast.
void note_cast(ObservedCall& call, const Tensor& tensor, const Tensor& cast, const SeenCast& seen) {
  using Last = Watch::Last;
  auto& op = static_cast<ObservedOp&>(call);
  CastCounts counts{tensor.scalar_type(), cast.scalar_type(), seen.of_weight};
  counts.seconds = op.is_timed ? seen.seconds : 0;
  const bool may_be_kept = seen.of_weight && counts.target != at::kFloat;
  const Last last = may_be_kept && seen.made ? op.watch->note_cast(tensor, cast) : Last::kNone;
  if (!seen.made || (seen.in_torchs_region && last == Last::kSameCast)) {
    counts.hits = 1;
  } else {
    counts.count = 1;
    counts.bytes = bytes_of(cast);
    counts.misses = seen.looked_for;
    if (last != Last::kNone) {
      counts.recasts = 1;
      counts.recast_bytes = counts.bytes;
    }
  }
  op.casts.add(counts);
  for (Given& given : op.given) {
    if (given.tensor == tensor.unsafeGetTensorImpl() && given.source.cast == ScalarType::Undefined) {
      given.source.cast = counts.target;
      given.source.casts = counts.count;
      given.source.cast_bytes = counts.bytes;
      break;
    }
  }
  if (!op.backward && !seen.of_weight) {
    note_chain(op, tensor, counts.target, bytes_of(cast));
  }
}

}  // namespace
