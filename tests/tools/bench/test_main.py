"""The command line of `scripts/bench`."""

import pytest

from lab.bench.__main__ import BENCHMARKS, parse_arguments


@pytest.mark.parametrize("what", BENCHMARKS)
def test_every_benchmark_parses_its_options(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_arguments([what, "--help"])
    assert exited.value.code == 0
    assert f"usage: bench {what}" in capsys.readouterr().out
