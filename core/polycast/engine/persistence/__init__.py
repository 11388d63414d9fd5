"""Caches of weights in files: what they hold, and how they are checked."""
