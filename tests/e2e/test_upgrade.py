"""A rolling upgrade under load of two prefill and two decode engines.

Clients ask as a router does. One engine after the other is taken out of the rotation, drained with
`nixl-kv drain`, stopped, and started again: as the same release or as one of another wire version.
"""

import subprocess
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from harness.cluster.client import Answer, Client, NoTicketError
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST, PATIENT, Engine, python_path
from harness.cluster.metrics import LOADS
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import nixl_kv_command
from harness.cluster.waiting import wait_or_fail
from support.asking import STUCK_S, Load, Rotation, judge, kinds
from support.other_version import copy_package

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.upgrade]

BETWEEN = 10  # requests that end while all engines serve


@pytest.mark.parametrize("crosses", [False, True], ids=["one wire version", "two wire versions"])
def test_no_request_is_lost_while_each_engine_is_drained_and_restarted(
    tmp_path: Path, *, crosses: bool
) -> None:
    env = {"PYTHONPATH": python_path(copy_package(tmp_path)), "PYTHONSAFEPATH": "1"}
    pair = pair_specs(ensure_tiny_model(), connector_config=PATIENT, kv_cache_bytes=96 << 20)
    specs = [replace(spec, name=f"{spec.name}-{number}") for spec in pair for number in (1, 2)]
    with Cluster(tmp_path / "logs") as cluster:
        engines = cluster.start(*specs)
        prefill, decode = Rotation(engines[:2]), Rotation(engines[2:])

        def complete(prompt: str, num_tokens: int) -> Answer:
            ticket = None  # where prefill gives none, routers hand that on, too
            with prefill.next() as client, suppress(NoTicketError):
                ticket = client.ticket(prompt)
            with decode.next() as client:
                return client.complete(prompt, num_tokens, kv_transfer_params=ticket)

        loads = 0.0
        with Load(complete, clients=4) as load:
            for engine in engines:
                load.wait(BETWEEN)
                rotation = prefill if engine.spec.role == "prefill" else decode
                take_out(engine, rotation)
                loads += loads_of(engine)
                engine.terminate()
                wait_or_fail(partial(has_ended, engine), STUCK_S, f"{engine.name} does not end")
                spec = engine.spec
                if crosses:
                    spec = replace(spec, name=f"{spec.name}-new", extra_env=env)
                rotation.servers += cluster.start(spec)
            load.wait(2 * BETWEEN)
        loads += sum(map(loads_of, decode.servers))
        with Client(prefill.servers[0].url) as alone:
            ended = kinds(judge(alone, load.ended))
    print(f"{len(load.ended)} requests, {loads:g} loads")
    assert ended == {"right": len(load.ended)}
    assert 0 < loads < len(load.ended) if crosses else loads == len(load.ended)


def take_out(engine: Engine, rotation: Rotation) -> None:
    """Take an engine out of rotation with an operator's commands."""
    rotation.remove(engine)
    at = f"{HOST}:{engine.side_port}"
    command = nixl_kv_command("drain", "--at", at, "--timeout", str(STUCK_S))
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_or_fail(lambda: rotation.is_idle(engine), STUCK_S, f"{engine.name} is asked too long")


def has_ended(engine: Engine) -> bool:
    return not engine.is_running()


def loads_of(engine: Engine) -> float:
    """How many requests have read their KV there."""
    with Client(engine.url) as client:
        return client.counters().get(LOADS, 0.0)
