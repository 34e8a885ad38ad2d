"""Copies of many small runs, on hosts and GPUs."""
