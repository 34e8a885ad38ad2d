"""Benchmarks of transfers and of engines, and the page that shows their records."""
