"""For all tests: how much hypothesis draws, and failures of `support` that show values."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from nixl_kv import keys
from nixl_kv.keys import USER_DIRECTORY, USER_KEY, write_key_file

pytest.register_assert_rewrite("support")

settings.register_profile("default", deadline=None)
settings.register_profile("slow", deadline=None, max_examples=1000)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of the tests share a key of their own, and leave the user's alone."""
    directory = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(directory))
        patch.setattr(keys, "_emptied_directories", list)
        (directory / USER_DIRECTORY).mkdir(mode=0o700)
        write_key_file(directory / USER_DIRECTORY / USER_KEY)
        yield
