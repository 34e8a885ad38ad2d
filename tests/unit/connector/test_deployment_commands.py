"""vLLM and we accept every engine's command line in configs/, docs/deploy/ and README."""

from typing import Final

import pytest
import vllm.config
from vllm.utils.argparse_utils import FlexibleArgumentParser

import nixl_kv.connector
from nixl_kv import addresses
from nixl_kv.config import Config
from support import engine_commands
from support.engine_commands import REPO, EngineCommand

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # vLLM 0.31 and 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

OTHERS: Final = (
    *("configs/lm_eval/", "configs/recall", "configs/matrix.yaml"),
    "configs/kubernetes/components/",
)
"""Files that start no engine. configs/*.json are values of an option: see tests/test_docs.py.
tests/test_manifests.py parses what the components add to engines."""

PATHS: Final = sorted(
    name
    for path in (REPO / "README.md", *REPO.glob("configs/**/*"), *REPO.glob("docs/deploy/**/*"))
    if path.is_file() and path.suffix != ".env"
    if not (name := str(path.relative_to(REPO))).startswith(OTHERS)
    if not path.match("configs/*.json")
)
FOUND: Final = {path: engine_commands.in_file(REPO / path) for path in PATHS}

each_command = pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=f"{path}-{number}")
        for path, commands in FOUND.items()
        for number, command in enumerate(commands)
    ],
)


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture(autouse=True)
def _route(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that runs tests may have no way out."""
    monkeypatch.setattr(addresses, "of_default_route", lambda: "10.0.0.1")


def test_no_command_is_overlooked() -> None:
    """Every engine's configuration names a connector, unless a command reads it from a file."""
    for path in PATHS:
        assert len(FOUND[path]) >= engine_commands.mentions(REPO / path), path
    assert sum(map(len, FOUND.values())) >= 20


@each_command
def test_vllm_accepts_it_and_its_connector_is_ours(
    command: EngineCommand, parser: FlexibleArgumentParser
) -> None:
    """The parser ends the process, which fails the test, at an option that it does not know."""
    transfer = parser.parse_args(list(command.arguments)).kv_transfer_config
    assert isinstance(transfer, vllm.config.KVTransferConfig)
    assert transfer.kv_connector in nixl_kv.connector.__all__
    assert transfer.kv_connector_module_path == "nixl_kv.connector"
    assert transfer.kv_role in ("kv_producer", "kv_consumer", "kv_both")
    Config.parse(transfer.kv_connector_extra_config, command.environment)
