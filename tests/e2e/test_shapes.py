"""Real engines of different shapes: some cells of scripts/matrix, which has all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pd.cells import chosen
from pd.matrix import Runner
from pd.outcomes import Outcome
from pd.pool import Place, Pool

pytestmark = pytest.mark.e2e

CELLS = ("qwen3/tp-1-2", "qwen3/tp-2-1")
SLOW_CELLS = ("qwen3/block-128-64", "gemma3/same")  # each with engines of its own
MOST_RANKS = 4


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """All cells in one go: the engines are shared."""
    return run(CELLS, tmp_path_factory.mktemp("shapes"))


@pytest.mark.parametrize("cell", CELLS)
def test_answers_are_those_of_a_single_engine_and_all_kv_is_read(
    outcomes: Mapping[str, Outcome], cell: str
) -> None:
    assert not outcomes[cell].verdict


@pytest.mark.slow
@pytest.mark.parametrize("cell", SLOW_CELLS)
def test_the_same_for_more_shapes(tmp_path: Path, cell: str) -> None:
    assert not run([cell], tmp_path)[cell].verdict


def run(names: Sequence[str], log_dir: Path) -> Mapping[str, Outcome]:
    """What came of these cells, by name."""
    found: list[Outcome] = []
    with Pool(Place("cpu", None, 0, log_dir)) as pool:
        for model, cells in chosen("cpu", names, gpus=0):
            Runner(pool, model, found).run(cells, MOST_RANKS)
    return {f"{outcome.model.name}/{outcome.cell.name}": outcome for outcome in found}
