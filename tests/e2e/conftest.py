"""Real engines, started once for all end-to-end tests: prefill, decode, a single one, a router."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/install")

from harness.cluster.client import Client
from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import Engine, EngineSpec
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.pair import Pair
from support.engines import PATIENT, Accounts, connected, without_connector

KV_CACHE_BYTES = 320 << 20  # the size of each cache, 1 MiB for each block: enough for all tests


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The engines of this session, which end with it."""
    with Cluster(tmp_path_factory.mktemp("engines")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the next step of a planted connector."""
    path = tmp_path_factory.mktemp("planted") / "plan"
    path.write_text("")
    return path


@pytest.fixture(scope="session")
def base_specs() -> tuple[EngineSpec, EngineSpec]:
    """The prefill and decode engine that most tests share.

    They have no key: so a ticket that a test has changed is not refused for its MAC alone.
    """
    prefill, decode = pair_specs(
        ensure_tiny_model(),
        kv_cache_bytes=KV_CACHE_BYTES,
        connector_config={**PATIENT, "insecure": True},
    )
    return prefill, decode


@pytest.fixture(scope="session")
def base_engines(
    cluster: Cluster, base_specs: tuple[EngineSpec, EngineSpec]
) -> tuple[Engine, Engine, Engine]:
    """Prefill, decode and single."""
    single = without_connector(base_specs[0], "single")
    prefill, decode, alone = cluster.start(*base_specs, single)
    with connected(prefill, decode):
        return prefill, decode, alone


@pytest.fixture
def pair(cluster: Cluster, base_engines: tuple[Engine, Engine, Engine]) -> Iterator[Pair]:
    prefill, decode, _ = base_engines
    with Pair(prefill, decode, cluster.route([prefill], [decode])) as pair:
        yield pair


@pytest.fixture
def single(base_engines: tuple[Engine, Engine, Engine]) -> Iterator[Client]:
    """An engine without a connector, whose answers the others should give."""
    with Client(base_engines[2].url) as client:
        yield client


@pytest.fixture
def accounts(pair: Pair) -> Iterator[Accounts]:
    """The counters of a test; neither engine holds a block before and after it."""
    accounts = Accounts(pair)
    accounts.expect_free()
    yield accounts
    accounts.expect_free()
