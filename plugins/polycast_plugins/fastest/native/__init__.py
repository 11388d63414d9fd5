"""C++ ops of the recipe "fastest", which ``polycast.plugin.load_ops`` builds and loads."""
