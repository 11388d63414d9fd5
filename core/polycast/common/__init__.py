"""Modules that any other may import: environment variables, events, locks at forks, cached properties."""
