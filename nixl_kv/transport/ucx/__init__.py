"""Work-arounds for UCX 1.23. Each file says which bug or limit it works around, and when it can go.

`transport/nixl.py` and `engine/` wire them; no other module names this folder.
"""
