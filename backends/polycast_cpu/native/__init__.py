"""The C++ of the CPU's backend: ops that ``polycast.load_ops`` builds and loads."""
