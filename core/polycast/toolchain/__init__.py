"""Build the C++ libraries with the installed compiler, cache them on disk, and load them."""
