"""Programs that show what nixl_kv does: real engines, engines in one process, simulated ones."""
