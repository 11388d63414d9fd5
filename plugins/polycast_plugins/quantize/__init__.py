"""Kernels for the recipes Int8, Int4 and Float8, and those that the recipe "fastest" uses on the CPU."""
