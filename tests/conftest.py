"""For all tests: how much hypothesis draws, and failures of `support` that show values."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("support")

settings.register_profile("default", deadline=None)
settings.register_profile("slow", deadline=None, max_examples=1000)
settings.load_profile("default")
