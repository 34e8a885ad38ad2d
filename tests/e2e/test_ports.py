"""A port that another engine uses ends a start before the weights are loaded."""

import socket

import pytest

from harness.cluster.cluster import Cluster
from harness.cluster.engines import HOST, EngineSpec, Role
from harness.cluster.models.files import ensure_tiny_model
from harness.cluster.processes import ProcessDiedError

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("role", "is_spawned"),
    [
        pytest.param("prefill", False, id="prefill, forked"),
        pytest.param("decode", True, id="decode, spawned"),
    ],
)
def test_a_used_port_is_named_before_the_weights_are_loaded(
    cluster: Cluster, role: Role, *, is_spawned: bool
) -> None:
    """vLLM forks its engine's process, or spawns it if the API server has used a GPU."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        spec = EngineSpec(
            f"second-{role}",
            ensure_tiny_model(),
            role,
            "nixl-kv",
            kv_cache_bytes=64 << 20,
            connector_config={"port": port},
            extra_env={"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn" if is_spawned else "fork"},
        )
        with pytest.raises(ProcessDiedError):
            cluster.start(spec)
    log = (cluster.log_dir / f"{spec.name}.log").read_text()
    assert f"['port'] is {port}; port {port} of {HOST} cannot be used: Address already in" in log
    assert "set VLLM_NIXL_SIDE_CHANNEL_PORT (or 'port') to another port for each engine" in log
    assert "Loading weights took" not in log
