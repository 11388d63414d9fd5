"""Modules that any other may import: environment variables, locks at forks, cached properties, text tables."""
