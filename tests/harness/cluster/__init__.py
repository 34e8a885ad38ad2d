"""Real engines as processes of one machine: prefill, decode, a router, and their clients."""
