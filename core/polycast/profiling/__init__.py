"""What is fast on a device: ops are timed in float32, in each fast dtype and by each recipe, once for each machine."""
