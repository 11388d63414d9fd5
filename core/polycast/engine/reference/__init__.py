"""The reference engine: autocast's semantics in Python, to be read."""
