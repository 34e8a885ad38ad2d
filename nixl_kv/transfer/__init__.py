"""The transfer engine: one thread per rank that moves KV; any inference engine can use it.

It imports neither vLLM nor torch (`gpu_digests` does, where the cache is in GPU memory).
`engine.TransferEngine` is the way in.
"""
