"""Backends: their contract, and discovering, loading and registering them."""
