"""How a rank reads remote KV: its NIXL agents, the remote ranks, and the ways to read."""
