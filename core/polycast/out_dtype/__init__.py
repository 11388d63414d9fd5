"""Ops whose result has another dtype than their inputs: the operator, and matmul kernels for backends."""
