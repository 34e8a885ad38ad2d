"""Where faults happen: two engines of one machine, or of two hosts that are namespaces."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import EngineSpec
from harness.cluster.netns import ADDRESSES, Namespace, Wire
from suites.faults.scene import (
    LEASE_S,
    NUM_BLOCKS,
    OFFER_TTL_S,
    REQUEST_TIMEOUT_S,
    Stage,
    Where,
)

CONFIG: Final[Mapping[str, object]] = {
    "offer_ttl_s": OFFER_TTL_S,
    "lease_s": LEASE_S,
    "request_timeout_s": REQUEST_TIMEOUT_S,
    "offer_share": 0.9,  # the caches are small, and offers are to last until a fault has hit them
}
KV_CACHE_BYTES: Final = 128 << 20
"""Enough for so few blocks."""
NETWORK: Final = {"insecure": True, "peers": [ADDRESSES]}
"""Two hosts of a network that nobody else is in, where UCX has nothing but TCP."""


def local_specs(model: Path, **config: Any) -> tuple[EngineSpec, EngineSpec]:
    """Prefill and decode on one machine. They keep their names, as an operator's, over restarts."""
    specs = pair_specs(
        model,
        suffix="-local",
        num_blocks=NUM_BLOCKS,
        kv_cache_bytes=KV_CACHE_BYTES,
        connector_config={**CONFIG, **config},
    )
    prefill, decode = (replace(spec, engine_id=spec.name) for spec in specs)
    return prefill, decode


@contextlib.contextmanager
def stage_at(where: Where, cluster: Cluster, model: Path) -> Iterator[Stage]:
    """A pair that answers; what it has of a network is removed in the end, with the engines."""
    if where == "local":
        prefill, decode = cluster.start(*local_specs(model))
        yield Stage(prefill, decode, router=cluster.route([prefill], [decode]))
        return
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(Namespace(f"kv-{role}", number))
            for number, role in enumerate(("prefill", "decode"), start=1)
        ]
        wire = stack.enter_context(Wire(*hosts))
        specs = [
            replace(
                spec,
                name=f"{spec.role}-{where}",
                engine_id=f"{spec.role}-{where}",
                host=host,
                connector_config={**CONFIG, **NETWORK, "host": host.wire_address},
            )
            for spec, host in zip(local_specs(model), hosts, strict=True)
        ]
        prefill, decode = cluster.start(*specs)
        stack.callback(cluster.end, prefill, decode)
        yield Stage(prefill, decode, wire=wire)
