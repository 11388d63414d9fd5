"""Regions: entering and leaving them, in blocks, functions, generators and threads; the state that they set."""
