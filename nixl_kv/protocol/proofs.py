"""What goes into the machines and comes out of them about digests. See `events`."""

from dataclasses import dataclass

from nixl_kv.geometry.excerpts import Excerpt
from nixl_kv.ids import Claim, Rank, RequestId
from nixl_kv.protocol.messages import Proof, Prove

# --- events of the data plane


@dataclass(frozen=True)
class ReadBegun:
    """A read whose bytes are to be verified is under way: this is what it reads."""

    request: RequestId
    source: Rank
    excerpts: tuple[Excerpt, ...]


@dataclass(frozen=True)
class Verified:
    """The bytes that landed were compared with prefill's; `difference` says where, in words.

    Nobody waits for a comparison to end: by its claim, an earlier attempt's is known. `refusal`:
    they cannot be compared, and why.
    """

    request: RequestId
    source: Rank
    claim: Claim
    difference: str | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class Digested:
    """What a reader asked to be proven: sums as in `Proof`. `refusal`: it cannot be, and why."""

    prove: Prove
    rows: bytes = b""
    columns: bytes = b""
    refusal: str | None = None


# --- actions


@dataclass(frozen=True)
class Digest:
    """Digest what a reader reads from an offer's blocks; answered by Digested."""

    prove: Prove
    tables: tuple[bytes, ...]


@dataclass(frozen=True)
class Verify:
    """Compare what landed, of tokens [begin, end), with prefill's proof; answered by Verified.

    `tables` are those of the `Load`: they begin at the entry that holds `begin`.
    """

    request: RequestId
    source: Rank
    excerpts: tuple[Excerpt, ...]
    begin: int
    end: int
    tables: tuple[bytes, ...]
    proof: Proof
