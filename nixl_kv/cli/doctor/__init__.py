"""`nixl-kv doctor`: checks of a host, of the settings of an engine, and of running engines."""
