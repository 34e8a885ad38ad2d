"""Layers of a comparison in words."""

import pytest

from nixl_kv.cli.comparison_report import layers_text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.layers.0.self_attn", "model.layers.1.self_attn"], "0-1"),
        ([f"x{number}.y" for number in range(36)], "0-35"),
        ([f"model.{number}.attn.1" for number in range(36)], "36"),
        (["a.0", "b.0"], "2"),
        (["a.0.1", "a.0.2"], "2"),
        (["a"], "1"),
    ],
)
def test_layers_are_shown_by_number_where_each_has_one(names: list[str], words: str) -> None:
    assert layers_text(names) == words
