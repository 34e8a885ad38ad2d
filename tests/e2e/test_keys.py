"""Real engines that share a key: requests go as always, and changed tickets lead nowhere.

They are configured as for vLLM's own NixlConnector: only our module's path and the key are new.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import HOST
from harness.cluster.metrics import LOADS, TICKETS_REFUSED, CountersSince
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from harness.cluster.prompts import random_prompt
from harness.cluster.tickets import changed
from nixl_kv.cli.client import describe
from nixl_kv.errors import TransportError
from nixl_kv.ids import endpoint_at
from nixl_kv.keys import read_key_file, write_key_file
from nixl_kv.protocol.ticket import FIELD
from support.engines import EVENT_S, Accounts, connected, started

pytestmark = pytest.mark.e2e

THEIR_KEYS = {"backends": ["UCX"], "num_threads": 4, "kv_lease_duration": 30}
"""Keys that users of vLLM's connector may have set."""


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    write_key_file(path)
    return path


@pytest.fixture(scope="module")
def keyed(cluster: Cluster, key_file: Path) -> Iterator[Pair]:
    specs = pair_specs(
        ensure_tiny_model(),
        suffix="-keyed",
        drop_in=True,
        kv_cache_bytes=128 << 20,
        connector_config={**THEIR_KEYS, "key_file": str(key_file)},
    )
    both = [replace(spec, role="both") for spec in specs]
    with started(cluster, *both) as engines, connected(*engines) as pair:
        yield pair


def test_engines_with_one_key_exchange_kv(keyed: Pair) -> None:
    prompt, accounts = random_prompt(300, seed=900), Accounts(keyed)
    ticket = keyed.to_prefill.ticket(prompt)
    assert ticket[FIELD].split(".")[1], "it has no MAC"
    answer = keyed.decode_with(ticket, prompt)
    accounts.expect_loaded(299)
    assert answer.tokens == keyed.to_prefill.complete(prompt).tokens
    log = keyed.prefill.log_text()
    assert "kv_connector_extra_config['kv_lease_duration'] counts as 'offer_ttl_s'" in log
    assert "kv_connector_extra_config['num_threads'] has no effect: " in log


def test_a_changed_ticket_is_computed_locally(keyed: Pair) -> None:
    prompt = random_prompt(150, seed=901)
    ticket, since = keyed.to_prefill.ticket(prompt), CountersSince(keyed.to_decode)
    answer = keyed.decode_with(changed(ticket, port=1), prompt)
    counted = since.wait_for(TICKETS_REFUSED, timeout_s=EVENT_S)
    assert (counted[TICKETS_REFUSED], counted[LOADS]) == (1, 0)
    assert answer.tokens == keyed.to_prefill.complete(prompt).tokens
    assert "kv_transfer_params: nixl_kv_ticket mac is " in keyed.decode.log_text()


def test_who_has_the_key_may_ask_and_nobody_else(keyed: Pair, key_file: Path) -> None:
    endpoint = endpoint_at(HOST, keyed.prefill.side_port)
    assert describe(endpoint, read_key_file(key_file)).ranks
    with pytest.raises(TransportError, match="handshake failed: perhaps it has a key"):
        describe(endpoint)


def test_no_secret_is_in_a_log(keyed: Pair, key_file: Path) -> None:
    keys = read_key_file(key_file)
    secrets = [key_file.read_text().strip(), keys.tickets.hex(), keys.server.hex()]
    for engine in keyed.engines:
        log = engine.log_text()
        assert f"it has the key {keys.fingerprint}" in log
        assert not [secret for secret in secrets if secret in log]
