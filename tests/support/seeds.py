"""The seeds of random tests: a constant each, or NIXL_KV_SEED for all, as CI sets it on main."""

import os
from typing import Final

ENVIRONMENT: Final = "NIXL_KV_SEED"
GIVEN: Final = os.environ.get(ENVIRONMENT, "")


def seed_or(constant: int) -> int:
    return int(GIVEN or constant)
