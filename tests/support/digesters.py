"""A slow digester."""

from collections.abc import Sequence

from nixl_kv.verify.digest import Digester, Steps
from nixl_kv.verify.slices import LocalSlice


class SlowDigester(Digester):
    """A digester that takes `steps` more steps. `secrets` has the secret of each."""

    def __init__(self, steps: int, pause_s: float = 0.5) -> None:
        self.steps = steps
        self.pause_s = pause_s
        self.secrets: list[str] = []
        self.is_closed = False

    def __call__(self, secret: str, local_slices: Sequence[LocalSlice]) -> Steps:
        for _ in range(self.steps):
            self.secrets.append(secret)
            yield
        return (yield from Digester()(secret, local_slices))

    def close(self) -> None:
        self.is_closed = True
