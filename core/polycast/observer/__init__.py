"""What ran in which dtype and why, what it cost, and what to do about it."""
