"""Platforms that send requests to prefill and decode: what each does to them, and real ones."""
