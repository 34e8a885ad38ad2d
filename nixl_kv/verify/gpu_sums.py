"""What the kernels that make digests have in common: see `geometry.digest`.

This module is imported only where the cache is in GPU memory: Triton is only there.
"""

import triton
import triton.language as tl


@triton.jit
# Triton reads these annotations, and takes no others.
def mixed(terms):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """`geometry.digest.mix`, of uint64."""
    terms = (terms ^ (terms >> 30)) * 0xBF58476D1CE4E5B9
    terms = (terms ^ (terms >> 27)) * 0x94D049BB133111EB
    return terms ^ (terms >> 31)


@triton.jit
def position(offset, step, token):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """What a token's place adds to its term, uint64; of int64, as all numbers of a key are here."""
    return (offset + token.to(tl.int64) * step).to(tl.uint64, bitcast=True)
