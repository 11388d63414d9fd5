"""Leaf modules that any room may import: environment variables, locks held over a fork, versions, text tables."""
