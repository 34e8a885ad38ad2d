"""Tiny models with random weights, made locally: no model hub, and the same bytes every time."""
