"""Choose the fastest way to compute an op, by a device's profile, for the recipe `Fastest`."""
