"""Where polycast meets the rest of torch: what reads, compiles or replaces torch's own autocast."""
