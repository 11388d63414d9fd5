"""Backends: the contract, finding and loading who supplies one, and which of them serves a device."""
