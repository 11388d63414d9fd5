"""Ops computed by a recipe: the plan for a device, its prepacked weights, and the operators of compiled code."""
