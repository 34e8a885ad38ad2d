"""Puts a rank's machinery together, on the transfer thread, and describes the rank to peers."""

import logging
from functools import partial
from typing import Final

from vllm.config import VllmConfig
from vllm.utils.network_utils import get_ip

from nixl_kv.config import Config
from nixl_kv.connector import shards, translate
from nixl_kv.connector.agents import Agents
from nixl_kv.connector.dataplane import DataPlane
from nixl_kv.connector.digests import Compute, Digests, Nowhere, OnHost
from nixl_kv.connector.engine import Machinery
from nixl_kv.connector.registering import register
from nixl_kv.connector.sources import Household, Identity
from nixl_kv.connector.trust import Trust
from nixl_kv.errors import ConfigError, DigestError
from nixl_kv.geometry.layout import CacheLayout
from nixl_kv.ids import new_incarnation
from nixl_kv.protocol import messages, ticket
from nixl_kv.protocol.offers import Offers
from nixl_kv.protocol.receiver import Receiver
from nixl_kv.protocol.requests import Requests
from nixl_kv.protocol.sender import Sender
from nixl_kv.transport.base import Transport
from nixl_kv.transport.control import Control
from nixl_kv.transport.door import is_local
from nixl_kv.transport.paced import SEGMENT_CONFIG, PacedTransport
from nixl_kv.transport.slots import SlotPage

logger = logging.getLogger(__name__)

NUM_SLOTS: Final = 16384
"""Offers that may be granted at the same time: 256 KiB of memory."""

UCX_ENGINE_CONFIG: Final = (
    # Read directly also between GPUs, or within one, on a host without NVLink. There UCX prefers
    # writes over reads where it has the choice; a READ then goes through TCP and the owner's memory
    # copies instead, at 0.4 GB/s on an H100 (docs/benchmarks.md).
    "CUDA_IPC_ENABLE_GET_ZCOPY=on,"
    # Over TCP, connect in the background: to a host that is cut off, UCX otherwise holds the
    # calling thread for two minutes. And let reads from such a host end, which they otherwise do
    # not: a connection fails on which nothing was acknowledged for 4 s.
    "TCP_CONN_NB=y,TCP_USER_TIMEOUT=4s,TCP_KEEPIDLE=2s,TCP_KEEPINTVL=1s,TCP_KEEPCNT=3"
)
"""Settings of UCX, without its prefix."""


def build(vllm_config: VllmConfig, layout: CacheLayout) -> Machinery:
    """Agent, sockets and machines of one life of this rank.

    Raises:
        NixlKVError: if NIXL or a socket fails, or the key file is not one.
    """
    config = translate.config(vllm_config)
    trust = Trust.of(config)
    incarnation = new_incarnation()
    rank = shards.rank(vllm_config)
    engine = vllm_config.kv_transfer_config.engine_id
    make = partial(_transport, config)
    identity = Identity(translate.model_facts(vllm_config), rank, trust.peers)
    household = Household.alone(layout, identity)
    reads = vllm_config.kv_transfer_config.is_kv_consumer
    digests = Digests(layout, _compute(layout, verifies=reads and config.verify > 0))
    agents = Agents(make, household)
    if reads:
        agents.open()
    slots = SlotPage(NUM_SLOTS)
    serving = None
    if vllm_config.kv_transfer_config.is_kv_producer:
        serving = make()
        register(serving, layout, slots)
    control = trust.control()
    offers = Offers(num_slots=NUM_SLOTS, offer_ttl_s=config.offer_ttl_s, lease_s=config.lease_s)
    reader = messages.Reader(engine, incarnation, rank)
    times = {"timeout_s": config.request_timeout_s, "renew_interval_s": config.renew_interval_s}
    description = messages.RankDescription(
        incarnation,
        _listen(control, config) if vllm_config.kv_transfer_config.is_kv_producer else "",
        serving.metadata() if serving is not None else b"",
        messages.Slots(slots.address, slots.count),
        layout,
    )
    return Machinery(
        control=control,
        data=DataPlane(agents, household, digests),
        serving=serving,
        slots=slots,
        sender=Sender(incarnation, offers),
        receiver=Receiver(reader, Requests(reader, **times)),
        description=messages.encode_rank(description),
    )


def _compute(layout: CacheLayout, *, verifies: bool) -> Compute:
    """How this rank digests. Where it cannot, that is an error only if it verifies what it reads.

    Raises:
        ConfigError: names `verify`.
    """
    if layout.memory == "DRAM":
        return OnHost()
    try:
        from nixl_kv.connector.device_digests import OnDevice  # noqa: PLC0415 - Triton: GPUs only

        return OnDevice(layout)
    except (ImportError, DigestError) as error:
        if verifies:
            told = f"verify is on, but KV cannot be digested here: {error}; allowed: 'off'"
            raise ConfigError(told) from error
        logger.warning("no load can be verified that is read from here: %s", error)
        return Nowhere(str(error))


def _transport(config: Config) -> Transport:
    from nixl_kv.transport.nixl import NixlTransport  # noqa: PLC0415 - nixl only where it is used

    if not config.paced_reads:
        return NixlTransport(config.backends, engine_config=UCX_ENGINE_CONFIG)
    settings = f"{UCX_ENGINE_CONFIG},{SEGMENT_CONFIG}"
    return PacedTransport(NixlTransport(config.backends, engine_config=settings))


def _listen(control: Control, config: Config) -> str:
    """Listen on any port of the configured host, or of this node where that host is another one.

    All ranks get the same configuration, but the ranks of one engine may run on several nodes.
    """
    host = config.host if is_local(config.host) else get_ip()
    port = control.listen(ticket.bind_address(host), 0)
    return ticket.endpoint(host, port)
