"""The command-line tool `nixl-kv`."""
