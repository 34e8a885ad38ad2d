"""What an engine counted."""

import time

from pd.client import Client, Counters


def changed(client: Client, before: Counters, name: str, timeout_s: float = 5.0) -> Counters:
    """All that changed since `before`, once `name` has changed."""
    deadline = time.monotonic() + timeout_s
    while True:
        now = client.counters()
        if now.get(name, 0.0) > before.get(name, 0.0):
            return {key: value - before.get(key, 0.0) for key, value in now.items()}
        assert time.monotonic() < deadline, f"{name} did not change in {timeout_s:g} s"
        time.sleep(0.05)
