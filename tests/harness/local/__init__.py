"""Engines inside this process, without vLLM: the real transfer engines, on memory of our own."""
