"""Cached casts of weights: which weights may be cached, when a cached cast is stale, and `WeightCache`."""
