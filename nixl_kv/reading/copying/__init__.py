"""Copies many small runs within GPU memory; `gather` and `staged` share it."""
