"""The HTML report of an observation, or of two."""
