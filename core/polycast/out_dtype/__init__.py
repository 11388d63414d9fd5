"""Ops with their result in another dtype than their inputs': the operator, and matmul kernels for backends' tables."""
