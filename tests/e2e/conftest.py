"""Real engines, started once for all end-to-end tests: prefill, decode, a single one, a router."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/install")

from pd.client import Client
from pd.cluster import Cluster, ClusterSpec, one_pair
from pd.engines import EngineSpec
from pd.tiny_model import TinyModel, ensure_tiny_model

OFFER_TTL_S = 6
# On few cores vLLM's spinning workers may starve a reader, and heartbeats, for seconds.
PATIENCE = {"lease_s": 30, "peer_timeout_s": 20}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = ensure_tiny_model()
    spec = one_pair(model, "nixl-kv", single=True, config={"offer_ttl_s": OFFER_TTL_S, **PATIENCE})
    with Cluster(spec, log_dir=tmp_path_factory.mktemp("engines")) as started:
        yield started


@pytest.fixture(scope="session")
def stranger(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A decode engine with another model, which is loaded by name alone, in both roles."""
    del cluster  # after the others: two cores start no more at a time
    model = ensure_tiny_model(model=TinyModel(layers=2, kv_heads=2, hidden=128))
    spec = EngineSpec("stranger", model, "both", "nixl-kv", dtype="float32", by_name=True)
    log_dir = tmp_path_factory.mktemp("stranger")
    with Cluster(ClusterSpec(decode=[spec]), log_dir=log_dir) as started:
        yield started


@pytest.fixture
def router(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.router_url) as client:
        yield client


@pytest.fixture
def prefill(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.prefill[0].url) as client:
        yield client


@pytest.fixture
def decode(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.decode[0].url) as client:
        yield client


@pytest.fixture
def single(cluster: Cluster) -> Iterator[Client]:
    assert cluster.single is not None
    with Client(cluster.single.url) as client:
        yield client


@pytest.fixture
def decode_log(cluster: Cluster) -> Path:
    return cluster.decode[0].log_path
