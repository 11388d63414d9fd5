"""C++ ops of the CPU's backend, which ``polycast.load_ops`` builds and loads."""
