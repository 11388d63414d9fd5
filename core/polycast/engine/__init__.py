"""The kernels at the Autocast dispatch keys: two engines with one semantics, and their caches of casts."""
