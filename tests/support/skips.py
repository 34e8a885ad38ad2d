"""Skipped tests in CI: a reason that tests/expected_skips.yaml does not list fails the run."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

ENVIRONMENT: Final = "NIXL_KV_EXPECTED_SKIPS"
LIST: Final = Path(__file__).resolve().parent.parent / "expected_skips.yaml"


def read_groups(names: str) -> list[str]:
    """The patterns of these groups. Raises KeyError for an unknown group."""
    groups = msgspec.yaml.decode(LIST.read_bytes(), type=dict[str, list[str]])
    return [pattern for name in names.split() for pattern in groups[name]]


EXPECTED: Final = read_groups(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None


def unexpected(skipped: Iterable[Any], patterns: Iterable[str]) -> list[str]:
    """The tests and files that were skipped for an unlisted reason, each with its reason."""
    matches = [re.compile(pattern).fullmatch for pattern in patterns]
    reasons = {(one.nodeid, one.longrepr[2].removeprefix("Skipped: ")) for one in skipped}
    return [
        f"{where}: {reason}"
        for where, reason in sorted(reasons)
        if not any(match(reason) for match in matches)
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if EXPECTED is None or reporter is None:  # the processes of pytest-xdist have no reporter
        return
    if found := unexpected(reporter.stats.get("skipped", ()), EXPECTED):
        reporter.section(f"skipped for reasons that {LIST.name} does not list", red=True)
        reporter.write_line("\n".join(found))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
