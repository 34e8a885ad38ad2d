"""The interface of every way to read, and the way that always works."""
