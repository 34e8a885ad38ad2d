"""One thread per rank that moves KV; any inference engine can use it.

`engine.TransferEngine` is the way in. Neither vLLM nor torch is imported.
"""
