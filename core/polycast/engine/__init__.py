"""What runs at the Autocast dispatch keys: two engines with one semantics, their kernels, and the casts they keep."""
