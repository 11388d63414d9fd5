"""The report: what was seen of a run, or of two, as one page of HTML that needs nothing but a browser."""
