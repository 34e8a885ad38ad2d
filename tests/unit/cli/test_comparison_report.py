"""Layers of a comparison in words."""

import pytest

from nixl_kv.cli.comparison_report import layers_text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.layers.0.self_attn", "model.layers.1.self_attn"], "0-1"),
        (["a.0", "b.0"], "2"),
        (["a.0.1", "a.0.2"], "2"),
        (["a"], "1"),
    ],
)
def test_layers_text(names: list[str], words: str) -> None:
    assert layers_text(names) == words
