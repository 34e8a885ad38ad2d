"""Verdicts become lines, JSON and an exit status."""

import json
from collections.abc import Iterator

import pytest

from nixl_kv.cli.doctor.report import (
    Check,
    Group,
    as_json,
    error,
    exit_status,
    ok,
    print_group,
    print_summary,
    run,
    skipped,
    warning,
)
from nixl_kv.cli.tables import open_console

GROUPS: list[Group] = [
    ("host", [ok("cores", "2"), skipped("GPUs", "none")]),
    ("key", [warning("key", "none", "make one"), error("port", "in use", "take another")]),
]


def test_json_has_all_checks_and_counts_their_verdicts() -> None:
    found = json.loads(json.dumps(as_json(GROUPS)))
    checks = found.pop("checks")
    assert found == dict.fromkeys(("ok", "skipped", "warning", "error"), 1)
    assert checks[2] == {
        "group": "key",
        "name": "key",
        "verdict": "warning",
        "detail": "none",
        "fix": "make one",
    }
    assert checks[0]["fix"] is None


def test_each_check_has_its_verdict_and_its_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "of " + "words " * 20
    print_group(open_console(), ("key", [*GROUPS[1][1], ok("long\x1b", long)]))
    print_summary(open_console(), GROUPS)
    assert [exit_status([each]) for each in GROUPS] == [0, 2]
    assert exit_status([("key", GROUPS[1][1][:1])]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [
        *("key", "warning key: none", "fix     make one", "error   port: in use"),
        "fix     take another",
    ]
    assert lines[5].startswith(r"ok      long\x1b: of words")
    assert max(map(len, lines)) <= 40
    assert lines[-1] == "1 error, 1 warning, 1 skipped, 1 ok"


def test_a_bug_in_a_check_hides_nothing() -> None:
    def checks() -> Iterator[Check]:
        yield ok("first", "done")
        raise KeyError("oops")

    title, (first, bug) = run("t", checks)
    assert (title, first.name) == ("t", "first")
    assert (bug.verdict, bug.detail) == ("warning", "a check failed: KeyError: 'oops'")
