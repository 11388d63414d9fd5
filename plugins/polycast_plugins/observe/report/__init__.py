"""HTML pages of observations and training runs."""
