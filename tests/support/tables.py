"""Block tables, as tests read them."""

from nixl_kv.geometry.layout import ABSENT, Table


def written_out(table: Table) -> list[int]:
    """All entries, from that of the prompt's first token on."""
    return [ABSENT] * table.first + table.block_ids.tolist()
