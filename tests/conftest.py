"""For all tests: how much hypothesis draws, and failures of `support` that show values."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("support")

settings.register_profile("default", deadline=None)
settings.register_profile("slow", deadline=None, max_examples=1000)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of the tests share a key of their own, and leave the user's alone."""
    directory = tmp_path_factory.mktemp("runtime")
    directory.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        yield
