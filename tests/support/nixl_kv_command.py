"""Runs `nixl-kv` in this process."""

import json
import shlex
from collections.abc import Mapping
from typing import Any, Final
from unittest.mock import patch

from typer.testing import CliRunner, Result

from harness.local.model_layouts import EngineShape, ModelShape, StatePart, build_layouts
from nixl_kv.cli import client
from nixl_kv.cli.main import app
from nixl_kv.engine.directory import describe_engine
from nixl_kv.geometry.match import ParallelShape
from nixl_kv.ids import Endpoint, EngineId, Incarnation
from nixl_kv.protocol.messages import Description, RankDescription, Slots, Status

QWEN3_8B: Final = ModelShape(layers=36, kv_heads=8, content=(256, 256), element="bfloat16")

HYBRID: Final = ModelShape(  # three layers with a state of 262 KiB, one with 1 KiB per token
    layers=4,
    kv_heads=4,
    content=(128, 128),
    element="bfloat16",
    without_kv=(0, 1, 2),
    recurrent=(0, 1, 2),
    state=(
        StatePart("query", 2, 256, "bfloat16 state", rows=3),
        StatePart("key", 2, 256, "bfloat16 state", rows=3),
        StatePart("value", 4, 256, "bfloat16 state", rows=3),
        StatePart("state", 4, 128 * 128 * 4, "float32 state"),
    ),
)


def nixl_kv(*arguments: str) -> Result:
    """Run a command; each argument may be several, as in a shell. No exception leaves it."""
    words = [word for argument in arguments for word in shlex.split(argument)]
    result = CliRunner(env={"COLUMNS": None}).invoke(app, words)  # whole tables
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def described(
    shape: EngineShape,
    model: ModelShape = QWEN3_8B,
    *,
    name: str = "E",
    facts: Mapping[str, str] = {"served_model_name": "qwen"},
) -> Description:
    """The description of an engine of this shape. Its ranks listen on ports 1, 2 and so on."""
    ranks = [
        RankDescription(
            incarnation=Incarnation(f"{number:032x}"),
            endpoint=Endpoint(f"tcp://10.0.0.1:{number + 1}"),
            agent=b"agent",
            slots=Slots(address=4096, count=8),
            layout=layout,
        )
        for number, layout in enumerate(build_layouts(model, shape))
    ]
    return describe_engine(EngineId(name), dict(facts), ParallelShape(shape.tp, shape.pp), ranks)


def answered(description: Description, weights: str = "", where: str = "") -> client.EngineAnswer:
    """An engine's answer without its ranks."""
    life = description.incarnation
    status = Status(incarnation=life, facts={"weights": weights}, totals={}, lists={})
    return client.EngineAnswer(where, description, status, [])


def plan(
    prefill: Description, decode: Description, *options: str, labels: tuple[str, str] = ("", "")
) -> Result:
    """Run `nixl-kv plan` on two engines that describe themselves like this."""
    hosts = {"10.0.0.1:5600": prefill, "10.0.0.2:5600": decode}
    engines = {
        where: answered(description, label, where)
        for (where, description), label in zip(hosts.items(), labels, strict=True)
    }
    with patch.object(client, "engine_at", lambda where, *_, **__: engines[where]):
        return nixl_kv(
            "plan --insecure --prefill-at 10.0.0.1:5600 --decode-at 10.0.0.2:5600", *options
        )


def plan_figures(prefill: Description, decode: Description, *options: str) -> dict[str, Any]:
    """The same, as JSON."""
    result = plan(prefill, decode, *options, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))
