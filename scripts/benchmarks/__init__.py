"""Benchmarks of transfers and of engines."""
