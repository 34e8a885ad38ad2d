"""Prefill, decode and router as processes of one machine, for demo, bench and e2e tests."""
