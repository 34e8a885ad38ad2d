"""Bugs to be planted, as `planted` has them: of what proves that bytes are prefill's."""

from typing import Any
from unittest.mock import patch

from nixl_kv.connector import digests
from nixl_kv.geometry import digest
from nixl_kv.protocol import proving, request, sender
from sim.planting import Planted, replaced


def proven_though_released() -> Planted:
    """A digest is a proof, whether its blocks are still held or not."""

    def make(before: Any) -> Any:
        def awaits(self: Any, prove: Any) -> bool:
            del self, prove
            return True

        del before
        return awaits

    return replaced(sender.Sender, "awaits", make)


def not_compared() -> Planted:
    """Whatever is to be verified is good as soon as its slot has stood."""

    def make(before: Any) -> Any:
        def checked(self: Any, source: Any, generation: bytes) -> Any:
            source.proving = None
            return before(self, source, generation)

        return checked

    return replaced(request.Request, "checked", make)


def difference_ignored() -> Planted:
    """What differs is taken for equal."""
    return patch.object(digest, "difference", lambda *_: None)


def digested_from_the_start() -> Planted:
    """The block tables of a load are taken to begin with the prompt."""

    def make(before: Any) -> Any:
        return lambda layout, tables, _begin: before(layout, tables, 0)

    return replaced(digests, "block_tables", make)


def proof_of_one_rank() -> Planted:
    """Decode has one proof for all ranks: the first that comes."""

    def make(before: Any) -> Any:
        def compare(request: Any, source: Any) -> Any:
            proofs = [s.proving.proof for s in request.sources.values() if s.proving is not None]
            first = next((proof for proof in proofs if proof is not None), None)
            if source.proving is not None:
                source.proving.proof = first
            return before(request, source)

        return compare

    return replaced(proving, "compare", make)
