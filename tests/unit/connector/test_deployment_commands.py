"""vLLM and we accept every engine's command line in configs/, docs/deploy/ and README."""

from pathlib import Path
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

COMMANDS: Final = {
    "README.md": 4,
    "configs/README.md": 1,
    "configs/compose.yaml": 2,
    "configs/docker/Dockerfile": 0,
    "configs/dynamo/launch.sh": 2,
    "configs/kubernetes/base/decode.yaml": 1,
    "configs/kubernetes/base/kustomization.yaml": 0,
    "configs/kubernetes/base/prefill.yaml": 1,
    "configs/kubernetes/kserve/kustomization.yaml": 0,
    "configs/kubernetes/kserve/llm-inference-service.yaml": 2,
    "configs/kubernetes/llm-d/decode.yaml": 1,
    "configs/kubernetes/llm-d/kustomization.yaml": 0,
    "configs/kubernetes/llm-d/prefill.yaml": 0,
    "configs/kubernetes/secret/kustomization.yaml": 0,
    "configs/kubernetes/vllm-router/kustomization.yaml": 0,
    "configs/kubernetes/vllm-router/router.yaml": 0,
    "configs/kubernetes/vllm-router/services.yaml": 0,
    "configs/ray/serve.yaml": 2,
    "docs/deploy/README.md": 1,
    "docs/deploy/aibrix.md": 0,
    "docs/deploy/compose.md": 0,
    "docs/deploy/dynamo.md": 1,
    "docs/deploy/kserve.md": 1,
    "docs/deploy/kubernetes.md": 1,
    "docs/deploy/llm-d.md": 0,
    "docs/deploy/multi-connector.md": 0,
    "docs/deploy/production-stack.md": 2,
    "docs/deploy/ray.md": 1,
    "docs/deploy/vllm-router.md": 0,
}
"""How many there are in each file."""

OTHERS: Final = (
    "configs/lm_eval/",
    "configs/recall/",
    "configs/recall-state/",
    "configs/matrix.yaml",
)
"""What starts no engine; and `configs/*.json` are values of an option, see tests/test_docs.py."""

FOUND: Final = {path: engine_commands.in_file(REPO / path) for path in COMMANDS}

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


def files() -> list[str]:
    paths = [REPO / "README.md", *REPO.glob("configs/**/*"), *REPO.glob("docs/deploy/**/*")]
    names = (str(path.relative_to(REPO)) for path in paths if path.is_file())
    return sorted(
        name
        for name in names
        if not name.startswith(OTHERS) and not Path(name).match("configs/*.json")
        if Path(name).suffix != ".env"
    )


def test_no_file_is_overlooked() -> None:
    assert sorted(COMMANDS) == files()


@pytest.mark.parametrize("path", COMMANDS)
def test_no_command_is_overlooked(path: str) -> None:
    """By two counts: a file's commands as they are expected, and the connectors that it names."""
    assert len(FOUND[path]) == COMMANDS[path]
    assert engine_commands.mentions(REPO / path) <= COMMANDS[path]


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
