"""C++ ops of the CPU's backend, which ``polycast.plugin.load_ops`` builds and loads."""
