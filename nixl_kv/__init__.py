"""A KV-cache connector for vLLM: disaggregated prefill and decode over NIXL.

Importing this package opens nothing and starts nothing. vLLM loads `nixl_kv.connector`; a program
that moves KV without vLLM uses `nixl_kv.engine`.
"""
