"""Digests that prove the bytes after a load."""
