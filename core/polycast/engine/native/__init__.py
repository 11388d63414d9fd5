"""The native engine: the semantics of the reference engine in C++, at the speed of torch's own kernels."""
