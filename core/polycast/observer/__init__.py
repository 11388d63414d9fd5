"""Observe which ops run in which dtype and why, at what cost, and what to do about it."""
