"""The table of attention backends: every row counts, and other forms are read in whole blocks."""

import itertools

import pytest

from nixl_kv.connector.backends import NAMES, OTHER, ROWS, UNKNOWN, Cache, Form, Row, find

TYPES = sorted({"uint8", "nvfp4", *(stored for row in ROWS for stored in row.stored or ())})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.backends[0]}: {row.reason}")
def test_no_row_hides_another(row: Row) -> None:
    for backend in row.backends:
        forms = itertools.product([backend], TYPES, [None, 8], [None, 656], [1, 4])
        assert row in {find(Cache(*each)) for each in forms}, backend


@pytest.mark.parametrize(
    ("cache", "row"),
    [
        pytest.param(Cache("NEW_ATTN", "bfloat16"), UNKNOWN, id="an unknown backend"),
        pytest.param(Cache("FLASH_ATTN", "bfloat16", None, 656), OTHER, id="a size"),
        pytest.param(Cache("FLASH_ATTN", "bfloat16", None, None, 2), OTHER, id="several tokens"),
        pytest.param(Cache("FLASHMLA", "fp8_ds_mla", None, 656), OTHER, id="a type"),
    ],
)
def test_engines_exchange_whole_blocks_of_anything_else(cache: Cache, row: Row) -> None:
    assert find(cache) is row
    assert row.form is Form.WHOLE


@pytest.mark.parametrize(
    ("cache", "form"),
    [
        (Cache("DEEPSEEK_V32_INDEXER", "uint8", tokens_per_state=4), Form.ENTRIES),
        (Cache("QWEN4_EXP_EXP_QSA_STATE", "bfloat16", tokens_per_state=4), Form.ENTRIES),
        (Cache("QWEN4_EXP_EXP_QSA_STATE", "bfloat16"), Form.REFUSED),
        (Cache("CPU_ATTN amx", "bfloat16"), Form.WHOLE),
        (Cache("CPU_ATTN vec", "fp8"), Form.WHOLE),
        (Cache("CPU_ATTN vec16", "float32"), Form.TRANSPOSED),
        (Cache("MINIMAX_M3_SPARSE", "nvfp4", 8, 72), Form.WHOLE),
    ],
)
def test_one_name_stands_for_several_forms(cache: Cache, form: Form) -> None:
    assert find(cache).form is form


def test_names_are_those_of_vllm() -> None:
    assert "CPU_ATTN" in NAMES
    assert not any(" " in name for name in NAMES)
