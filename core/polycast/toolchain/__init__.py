"""Compile C++ libraries, cache them on disk, and load them."""
