"""The example in docs/library.md, run as it stands there."""

import pytest
from documented import code

torch = pytest.importorskip("torch")
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 2, 12, 4, 16, 32


@pytest.mark.nixl
@pytest.mark.parametrize("tp", [1, 2], ids="TP{}".format)
def test_the_example(tp: int) -> None:
    library = code("library.md")
    whole = torch.randn(LAYERS, BLOCKS, 2, HEADS, TOKENS, SIZE)
    prefill = (library.agent(library.describe(whole, 0)), library.describe(whole, 0))
    for rank in range(tp):
        first, count = rank * HEADS // tp, HEADS // tp
        part = torch.zeros(LAYERS, BLOCKS, 2, count, TOKENS, SIZE)
        layout = library.describe(part, first)
        decode = (library.agent(layout), layout)
        assert len(layout.groups[0].regions) == LAYERS
        reads = library.read(decode, prefill, ([7, 2, 9], [3, 4, 0]), 40)
        assert reads.num_bytes == 3 * part[:, 0].nbytes
        assert reads.num_runs == 3 * LAYERS * (1 if tp == 1 else 2)
        assert torch.equal(part[:, [7, 2, 9]], whole[:, [3, 4, 0], :, first : first + count])
        assert not part[:, [0, 1, 3, 4, 5, 6, 8, 10, 11]].any()
        decode[0].close()
    prefill[0].close()
