"""The command `nixl-kv`: what a person asks of two engines, without starting either."""
