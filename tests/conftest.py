"""For all tests: what random tests draw, and failures of `support` that show values."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from nixl_kv import keys
from nixl_kv.keys import USER_DIRECTORY, USER_KEY, write_key_file

pytest.register_assert_rewrite("support")

from harness.cluster.processes import END_CODES  # noqa: E402
from support.seeds import ENVIRONMENT, GIVEN  # noqa: E402 - after the line above
from support.skips import pytest_sessionfinish  # noqa: E402, F401 - a hook

# A run repeats the one before, unless it is given a seed. Where CI sets CI, hypothesis would
# otherwise draw the same in each run, seed or not.
common: dict[str, Any] = {"deadline": None, "database": None, "print_blob": True}
settings.register_profile("default", **common, derandomize=not GIVEN)
settings.register_profile("slow", **common, derandomize=False, max_examples=1000)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if GIVEN and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = GIVEN


def pytest_report_header() -> str:
    return f"random tests: {ENVIRONMENT} is {GIVEN or 'not set, each has a constant seed'}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A signal raises SystemExit (`end_on_signals`), which pytest takes for a failed test.
    ended_by = call.excinfo.value if call.excinfo else None
    if isinstance(ended_by, SystemExit) and ended_by.code in END_CODES:
        pytest.exit(f"a signal has ended {report.nodeid}", returncode=ended_by.code)
    if GIVEN and report.failed:
        report.sections.append(("seed of random tests", f"{ENVIRONMENT}={GIVEN}"))
    return report


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of the tests share a key of their own, and leave the user's alone."""
    directory = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(directory))
        patch.setattr(keys, "_emptied_directories", list)
        patch.setattr(keys, "_lasting_directories", lambda: [directory / USER_DIRECTORY])
        (directory / USER_DIRECTORY).mkdir(mode=0o700)
        write_key_file(directory / USER_DIRECTORY / USER_KEY)
        yield
