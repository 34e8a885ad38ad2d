"""The code of docs/library.md runs as it stands there."""

import importlib
from typing import Any

import pytest

from harness.local.engine import HAS_VERIFY
from support import documented

torch = pytest.importorskip("torch")
pytest.importorskip("nixl_kv.transport.nixl", exc_type=ImportError)

pytestmark = pytest.mark.nixl

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 2, 12, 4, 16, 32


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module, which its second process can import too."""
    monkeypatch.syspath_prepend(documented.DOCS)
    return importlib.import_module(documented.EXAMPLE.stem)


def test_two_processes_move_a_paged_cache(
    two_processes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    example = two_processes
    cache, ended = example.main()
    assert ended.failure is None
    assert ended.verified == HAS_VERIFY
    assert capsys.readouterr().out == "load: good, offer: read\n"
    expected = example.computed_cache()[:, example.PREFILL_BLOCKS]
    assert torch.equal(cache[:, example.DECODE_BLOCKS], expected)
    others = [block for block in range(BLOCKS) if block not in example.DECODE_BLOCKS]
    assert not cache[:, others].any()


@pytest.mark.parametrize("tp", [1, 2], ids="TP{}".format)
def test_the_planner_and_the_transport_alone(tp: int) -> None:
    library = documented.library()
    whole = torch.randn(LAYERS, BLOCKS, 2, HEADS, TOKENS, SIZE)
    prefill = (library.agent(library.describe(whole)), library.describe(whole))
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
