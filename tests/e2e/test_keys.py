"""Real engines that share a key: requests go as always, and what a client changed leads nowhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from counting import changed

from nixl_kv.cli.engines import ask
from nixl_kv.errors import TransportError
from nixl_kv.keys import read_key_file, write_key_file

pytest.importorskip("vllm", reason="needs vLLM: scripts/install")

from pd.client import Client
from pd.cluster import Cluster, ClusterSpec
from pd.engines import EngineSpec
from pd.prompts import random_prompt
from pd.tiny_model import ensure_tiny_model

pytestmark = pytest.mark.e2e

WANT_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    write_key_file(path)
    return path


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Cluster]:
    model, config = ensure_tiny_model(), {"key_file": str(key_file)}
    prefill, decode = (
        EngineSpec(
            f"{role}-keyed", model, role, "nixl-kv", connector_config=config, dtype="float32"
        )
        for role in ("prefill", "decode")
    )
    log_dir = tmp_path_factory.mktemp("keyed")
    with Cluster(ClusterSpec([prefill], [decode]), log_dir=log_dir, route=False) as started:
        yield started


@pytest.fixture
def prefill(keyed: Cluster) -> Iterator[Client]:
    with Client(keyed.prefill[0].url) as client:
        yield client


@pytest.fixture
def decode(keyed: Cluster) -> Iterator[Client]:
    with Client(keyed.decode[0].url) as client:
        yield client


def test_engines_with_one_key_exchange_kv(prefill: Client, decode: Client) -> None:
    prompt = random_prompt(300, seed=900)
    ticket = prefill.ticket(prompt, WANT_TICKET)
    assert ticket is not None
    assert ticket["mac"]
    before = decode.counters()
    answer = decode.complete(prompt, kv_transfer_params=ticket)
    moved = changed(decode, before, "vllm:nixl_kv_loads_total")
    assert moved["vllm:nixl_kv_tokens_loaded_total"] == 299
    assert answer.tokens == prefill.complete(prompt).tokens


@pytest.mark.parametrize(
    "changes", [{"remote_port": 1}, {"mac": ""}, {"mac": "0" * 32}, {"num_tokens": 100}]
)
def test_a_changed_ticket_is_computed_locally(
    prefill: Client, decode: Client, keyed: Cluster, changes: dict[str, object]
) -> None:
    prompt = random_prompt(150, seed=901)
    ticket = prefill.ticket(prompt, WANT_TICKET)
    assert ticket is not None
    before = decode.counters()
    answer = decode.complete(prompt, kv_transfer_params={**ticket, **changes})
    counted = changed(decode, before, "vllm:nixl_kv_tickets_refused_total")
    assert counted["vllm:nixl_kv_loads_total"] == 0
    assert answer.tokens == prefill.complete(prompt).tokens
    assert "kv_transfer_params: mac is " in keyed.decode[0].log_path.read_text()


def test_who_has_the_key_may_ask_and_nobody_else(keyed: Cluster, key_file: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{keyed.prefill[0].side_port}"
    keys = read_key_file(key_file)
    assert ask(endpoint, keys).ranks
    with pytest.raises(TransportError, match="handshake failed: perhaps it has a key"):
        ask(endpoint)


def test_no_secret_is_in_a_log(keyed: Cluster, key_file: Path) -> None:
    keys = read_key_file(key_file)
    secrets = [key_file.read_text().strip(), keys.tickets.hex(), keys.server.hex()]
    for engine in keyed.engines:
        log = engine.log_path.read_text()
        assert f"it has the key {keys.fingerprint}" in log
        assert not [secret for secret in secrets if secret in log]
