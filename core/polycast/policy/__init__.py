"""Policies: the casts of ops, rules for modules and recipes, with names, files and validation."""
