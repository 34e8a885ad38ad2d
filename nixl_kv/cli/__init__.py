"""The command `nixl-kv`: what a person asks of engines, without starting one."""
