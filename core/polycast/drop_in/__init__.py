"""Standing in for torch's autocast: the patch, and running a program that nobody changed."""
