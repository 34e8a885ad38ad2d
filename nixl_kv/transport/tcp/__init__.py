"""Paced reads over TCP."""
