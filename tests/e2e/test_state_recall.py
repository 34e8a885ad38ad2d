"""A trained model whose answers come through recurrent state alone: with it, and without."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.cluster import Cluster, pair_specs
from harness.cluster.engines import python_path
from harness.cluster.models.files import REPO
from harness.cluster.pair import Pair
from support.engines import PATIENT, Accounts, connected, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[1]
FOLDER = REPO / "configs" / "recall-state"
LINES = (FOLDER / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[::6]
ITEMS = [json.loads(line) for line in LINES]
ANSWER = 16


def count_right(pair: Pair) -> int:
    """Answers that are right to their end."""
    accounts = Accounts(pair)
    answers = [pair.complete(item["prompt"], ANSWER, ignore_eos=False).text for item in ITEMS]
    accounts.expect_loaded(*(len(item["prompt"].split()) - 1 for item in ITEMS))
    return sum(
        text.split() == item["answer"].split() for text, item in zip(answers, ITEMS, strict=True)
    )


def test_answers_are_right_with_the_state_and_never_without(cluster: Cluster) -> None:
    prefill, decode = pair_specs(
        FOLDER, suffix="-state", dtype="bfloat16", connector_config=PATIENT
    )
    without = replace(
        decode,
        name=f"{decode.name}-less",
        module="support.without_state",
        extra_env={"PYTHONPATH": python_path(TESTS)},
    )
    with started(cluster, prefill, decode, without) as (producer, *consumers):
        right = []
        for consumer in consumers:
            with connected(producer, consumer) as pair:
                right.append(count_right(pair))
    assert right[0] >= len(ITEMS) - 1
    assert right[1] == 0
