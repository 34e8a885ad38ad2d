"""Reads over TCP in small pieces, so that prefill survives readers that die.

Remove this folder and its call in `nixl_kv/transport/nixl.py` to read all peers in one piece.
"""
