"""How engines may exchange the cache of each attention backend of vLLM, as data.

A backend's name is not a key, because one name covers several forms of a cache. So `find` also
compares the fields of a layer's spec by which vLLM changes the form. docs/compatibility.md has this
table; scripts/contract finds names of a release that it lacks. This module does not import vLLM.
"""

from enum import Enum
from fractions import Fraction
from typing import Final, NamedTuple


class Form(Enum):
    """The parts of a block that two engines may exchange. The value is for people."""

    PLAIN = "any part"  # the bytes follow the axes of vLLM's view
    TRANSPOSED = "any part: K is stored as [size, tokens]"
    SCALES_LAST = "any part: keys, then scales"
    STATE = "any part: one state for all tokens"  # the spec describes it
    ENTRIES = "whole blocks, at any TP"
    WHOLE = "whole blocks of equal shards"
    REFUSED = "not at all: the engine does not start"


class Cache(NamedTuple):
    """The facts about a layer's cache that decide its form."""

    backend: str  # vLLM's name; the instruction set of CPU_ATTN or "rocm" may follow
    stored: str  # --kv-cache-dtype as the layer resolves it if that quantises, else the dtype
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1


class Row(NamedTuple):
    """A form, and the caches that have it."""

    backends: tuple[str, ...]
    form: Form
    reason: str
    stored: frozenset[str] | None = None  # None: any type
    # Whether the spec sets the field, or keeps one state for several tokens. None: either.
    has_slots: bool | None = False
    has_content: bool | None = False
    has_groups: bool | None = False

    def covers(self, cache: Cache) -> bool:
        facts = (
            (self.has_slots, cache.num_head_slots is not None),
            (self.has_content, cache.state_content_bytes is not None),
            (self.has_groups, cache.tokens_per_state != 1),
        )
        return (
            # With what follows the name, or with anything.
            not {cache.backend, cache.backend.split()[0]}.isdisjoint(self.backends)
            and (self.stored is None or cache.stored in self.stored)
            and all(wanted in (None, found) for wanted, found in facts)
        )


# Types that vLLM stores without scales.
_WIDE: Final = frozenset(("float32", "bfloat16", "float16"))
_E4M3: Final = frozenset(("fp8", "fp8_e4m3"))


def _any(backends: tuple[str, ...], form: Form, reason: str) -> Row:
    """A row for all forms of these backends that no row above covers."""
    return Row(backends, form, reason, has_slots=None, has_content=None, has_groups=None)


# The first row that covers a cache counts.
ROWS: Final = (
    # --- K and V of each head
    Row(
        (
            *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER"),
            *("FLEX_ATTENTION", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"),
        ),
        Form.PLAIN,
        "K and V of a token and head lie together",
    ),
    Row(
        ("TRITON_ATTN",),
        Form.PLAIN,
        "K, its scale, V and its scale of a token and head lie together",
        frozenset(("fp8_per_token_head", "int4_per_token_head", "int8_per_token_head")),
        has_content=True,
    ),
    Row(
        ("TRITON_FLASH_ATTN", "TRITON_FLASHINFER"),
        Form.PLAIN,
        "both kernels share the cache of `TRITON_ATTN`",
    ),
    Row(
        ("HPC_ATTN", "QWEN4_EXP_QSA_TRITON", "STEP5_DSA"),
        Form.PLAIN,
        "as `FLASH_ATTN`",
    ),
    Row(
        ("MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA"),
        Form.PLAIN,
        "as `FLASH_ATTN`, with blocks of 128 tokens",
        _WIDE | _E4M3 | {"fp8_e5m2"},
    ),
    Row(
        ("INKLING_SCONV_SWA",),
        Form.PLAIN,
        "the inputs of four convolutions, divided like KV heads, lie together",
    ),
    Row(
        ("CPU_ATTN vec", "CPU_ATTN vec16"),
        Form.TRANSPOSED,
        "a head's block is K, then V as [tokens, size]",
        _WIDE,
    ),
    _any(("CPU_ATTN",), Form.WHOLE, "tiles of another instruction set, or quantised"),
    Row(
        ("FLASHINFER",),
        Form.WHOLE,
        "NVFP4: the scales lie apart, with another stride",
        has_slots=True,
        has_content=True,
    ),
    Row(
        ("MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA"),
        Form.WHOLE,
        "NVFP4: the scales lie apart; ROCm: tiles of 16 tokens",
        has_slots=True,
        has_content=None,
    ),
    _any(("B12X",), Form.WHOLE, "a plane of K, then one of V; not run"),
    _any(
        ("TURBOQUANT", "ULTRAQUANT", "ROCM_OCTAVE"),
        Form.WHOLE,
        "scales beside each token and head; not run",
    ),
    _any(("ROCM_ATTN", "ROCM_SEGMENTED_ATTN"), Form.WHOLE, "K is packed for the kernel"),
    _any(("ROCM_AITER_UNIFIED_ATTN",), Form.WHOLE, "not run"),
    Row(
        ("FLASH_ATTN",),
        Form.WHOLE,
        "ROCm's AITER shuffles blocks",
        has_slots=True,
        has_content=None,
    ),
    # --- one latent per token
    Row(
        (
            *("AITER_TRITON_MLA", "AMX_MLA", "CPU_MLA", "CUTLASS_MLA"),
            *("DOTS3_NOTE_PADDED_MLA_SPARSE", "FLASHINFER_MLA"),
            *("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"),
            *("FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA"),
            *("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4", "ROCM_AITER_MLA"),
            *("ROCM_AITER_MLA_SPARSE", "TOKENSPEED_MLA", "TRITON_MLA", "XPU_MLA_SPARSE"),
        ),
        Form.PLAIN,
        "a token's latent lies together",
        _WIDE,
    ),
    Row(
        (
            *("CUTLASS_MLA", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE"),
            *("FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA", "TOKENSPEED_MLA", "TRITON_MLA"),
        ),
        Form.PLAIN,
        "a token's latent lies together; one scale for all",
        _E4M3,
    ),
    Row(
        ("FLASHINFER_MLA_SPARSE_SM120", "FLASHMLA_SPARSE"),
        Form.PLAIN,
        "a token's latent and its scales lie together",
        frozenset(("fp8_ds_mla",)),
        has_content=True,
    ),
    Row(
        ("FLASHMLA_SPARSE",),
        Form.PLAIN,
        "a token's latent and its scales lie together",
        frozenset(("nvfp4_ds_mla",)),
        has_content=True,
    ),
    _any(
        ("AITER_TRITON_MLA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE"),
        Form.WHOLE,
        "FP8 on ROCm: not run",
    ),
    # --- keys of an indexer
    Row(
        ("MINIMAX_M3_SPARSE_INDEXER",),
        Form.PLAIN,
        "a token's key lies together; FP8 without scales",
        _WIDE | {"float8_e4m3fn"},
    ),
    Row(
        ("DEEPSEEK_V32_INDEXER rocm",),
        Form.WHOLE,
        "tiles of 16 tokens",
        has_content=None,
        has_groups=None,
    ),
    Row(
        ("DEEPSEEK_V32_INDEXER",),
        Form.SCALES_LAST,
        "the scales lie behind the keys of a kernel block",
        frozenset(("uint8",)),
    ),
    _any(
        (
            *("DEEPSEEK_V32_INDEXER", "CPU_V4_INDEXER", "DEEPSEEK_V4_INDEXER"),
            *("DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER"),
            *("DEEPSEEK_V41_ROCM_MXFP4_INDEXER", "DEEPSEEK_V4_ROCM_MXFP4_INDEXER"),
        ),
        Form.ENTRIES,
        "one key for several tokens, and scales apart",
    ),
    Row(
        ("QWEN4_EXP_EXP_QSA_STATE",),
        Form.ENTRIES,
        "one key for several tokens",
        has_groups=True,
    ),
    _any(("STEP5_CSA_SUMMARY",), Form.ENTRIES, "one summary for eight tokens"),
    # --- compressed latents, and their sources
    Row(("CompressorBackend",), Form.PLAIN, "a token's row lies together", _WIDE),
    _any(
        (
            *("CPU_V4_MLA_SPARSE", "DEEPSEEK_SPARSE_SWA", "FLASHINFER_MLA_SPARSE_DSV4"),
            *("FLASHINFER_MLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41", "FLASHMLA_SPARSE_DSV4"),
            *("FLASHMLA_SPARSE_DSV41", "ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV41"),
            "XPU_V4_MLA_SPARSE",
        ),
        Form.ENTRIES,
        "one latent for several tokens, and scales apart",
    ),
    _any(
        ("KPOOL_TAIL", "QWEN4_EXP_EXP_QSA_STATE", "STEP5_CSA_TAIL_RING"),
        Form.REFUSED,
        "a ring: one block per request, whose rows wrap",
    ),
    # --- others
    _any(
        (
            *("BAILING_LINEAR_ATTN", "GDN_ATTN", "KIMI_K3_KDA", "KIMI_K3_KDA_ROCM", "LINEAR_ATTN"),
            *("MAMBA1_ATTN", "MAMBA2_ATTN", "PLE_SHORT_CONV_ATTN", "SHORT_CONV_ATTN"),
        ),
        Form.STATE,
        "`MambaSpec` has the shapes",
    ),
    _any(("CACHE_ONLY_ATTN",), Form.REFUSED, "hidden states of a draft model"),
)

UNKNOWN: Final = Row((), Form.WHOLE, "a backend that this release does not know")
OTHER: Final = Row((), Form.WHOLE, "a form that was not read")

NAMES: Final = frozenset(name.split()[0] for row in ROWS for name in row.backends)
"""vLLM's names (`get_name`) of all backends that the table knows."""


def find(cache: Cache) -> Row:
    """The row of a cache; `UNKNOWN`, or `OTHER` if the table only knows other forms of it."""
    rest = OTHER if cache.backend.split()[0] in NAMES else UNKNOWN
    return next((row for row in ROWS if row.covers(cache)), rest)
