"""Prefill packs small runs into a staging slot; decode reads one large run."""
