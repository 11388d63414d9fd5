"""C++ ops for the CPU, which ``polycast.plugin.load_ops`` builds and loads."""
