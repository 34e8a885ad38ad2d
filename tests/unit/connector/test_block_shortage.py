"""A request waits for blocks: for how long, and what counts as progress."""

from collections.abc import Sequence

import pytest

from nixl_kv.connector.block_shortage import PATIENCE_S, BlockShortage
from support.stepped import Clock

Step = Sequence[int | str]
"""What happens in it: so many blocks are asked for, or `progress`."""

WAITS: Step = [5]
MOVES: Step = [5, "progress"]
OFFER_ENDS: Step = ["progress", 5]
IDLE: Step = []


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([(0, WAITS), (PATIENCE_S, WAITS)], [0, 5], id="patience ends"),
        pytest.param([(0, WAITS), (PATIENCE_S / 2, WAITS)], [0, 0], id="patience"),
        pytest.param([(0, WAITS), (PATIENCE_S, IDLE)], [0, 0], id="nobody waits any more"),
        pytest.param(
            [(0, WAITS), (0.5, IDLE), (PATIENCE_S, WAITS)], [0, 0, 0], id="another one waits"
        ),
        pytest.param([(0, WAITS), (PATIENCE_S, MOVES)], [0, 0], id="it has its blocks"),
        pytest.param(
            [(0, WAITS), (PATIENCE_S, MOVES), (PATIENCE_S + 0.5, WAITS)], [0, 0, 0], id="anew"
        ),
        pytest.param([(0, WAITS), (PATIENCE_S, OFFER_ENDS)], [0, 0], id="an offer has ended"),
        pytest.param(
            [(0, WAITS), (PATIENCE_S, WAITS), (1.5 * PATIENCE_S, WAITS), (2 * PATIENCE_S, [7])],
            [0, 5, 0, 7],
            id="again, if that was not enough",
        ),
        pytest.param([(0, [9, "progress", 3]), (PATIENCE_S, [3])], [0, 3], id="the next one waits"),
    ],
)
def test_when_blocks_must_come_free(
    steps: Sequence[tuple[float, Step]], expected: Sequence[int]
) -> None:
    clock = Clock()
    start = clock.now
    shortage = BlockShortage(clock)
    needed = []
    for when, step in steps:
        clock.now = start + when
        for each in step:
            if isinstance(each, int):
                shortage.on_question(each)
            else:
                shortage.on_progress()
        needed.append(shortage.pop_needed())
    assert needed == expected
