"""Digests that prove the bytes of a load, independent of how both sides are sharded.

Start with `part`, which has the protocol's part of both sides. `queue` computes the digests.
"""

from functools import partial

from nixl_kv.errors import ConfigError, DigestError, get_logger
from nixl_kv.feature import Feature, RankSetup
from nixl_kv.protocol import events
from nixl_kv.verify.digest import Digester
from nixl_kv.verify.part import DigestPart, ProofPart
from nixl_kv.verify.queue import DigestQueue
from nixl_kv.verify.slices import name_slices

logger = get_logger(__name__)


def build(setup: RankSetup) -> Feature:
    """Let prefill digest blocks for its readers, and decode compare the bytes of its loads.

    A rank that has nothing to digest, or cannot, refuses to. On a GPU this compiles the program,
    which takes seconds: on each prefill rank, because any reader may ask, and on a decode rank that
    verifies loads.

    Raises:
        ConfigError: the rank verifies loads and cannot digest KV.
    """
    digester: Digester | None = None
    verifies = setup.is_decode and setup.config.verify > 0
    try:
        if setup.layout.memory == "DRAM":
            digester = Digester()
        elif setup.is_prefill or verifies:
            from nixl_kv.verify.gpu import GpuDigester  # noqa: PLC0415 - torch: GPUs only

            digester = GpuDigester(setup.layout)
    except (ImportError, DigestError) as error:
        if verifies:
            raise ConfigError(
                f"verify is on, but this rank cannot digest KV: {error}; install Triton and a C "
                "compiler for it, or set verify to 'off'"
            ) from error
        logger.warning("loads that read from this rank cannot be verified: %s", error)
    digests, proofs = DigestPart(), ProofPart(partial(name_slices, setup.layout))

    def is_wanted(action: events.DigestAction) -> bool:
        part = digests if isinstance(action, events.MakeDigest) else proofs
        return part.is_wanted(action)  # type: ignore[arg-type] # each has its own action

    queue = DigestQueue(setup.layout, digester, setup.counts, setup.clock, is_wanted)
    return Feature(prefill=digests, load=proofs, worker=queue)
