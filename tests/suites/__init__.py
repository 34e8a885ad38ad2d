"""Suites: programs that put engines into some situation, and judge what comes of it."""
