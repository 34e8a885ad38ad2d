"""What a platform's answers and counters amount to."""

from dataclasses import replace

import pytest

from suites.platforms.asking import Asked, Outcome, count

ASKED = Asked(working=2, requests=3, loadable=300, loaded=300, right=3)
GOOD = Outcome("router", "1.0", "0.32", "one line", engines=2, asked=ASKED)


@pytest.mark.parametrize(
    ("outcome", "kind", "words"),
    [
        pytest.param(GOOD, "good", "ok", id="all right, all moved"),
        pytest.param(
            replace(GOOD, asked=replace(ASKED, right=2)),
            "bad",
            "1 of 3 answers differ",
            id="a wrong answer",
        ),
        pytest.param(
            replace(GOOD, asked=replace(ASKED, loaded=0)),
            "bad",
            "300 tokens not loaded",
            id="silently local",
        ),
        pytest.param(
            replace(GOOD, asked=replace(ASKED, working=1)),
            "bad",
            "1 of 2 engines did nothing",
            id="one engine was left out",
        ),
        pytest.param(replace(GOOD, trouble="it fell"), "bad", "it fell", id="trouble"),
        pytest.param(
            Outcome("router", "1.0", "0.32"), "bad", "nothing was asked", id="it did not start"
        ),
    ],
)
def test_only_right_answers_moved_kv_and_working_engines_are_good(
    outcome: Outcome, kind: str, words: str
) -> None:
    assert (outcome.verdict.kind, outcome.verdict.words) == (kind, words)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        pytest.param(
            "# TYPE vllm:nixl_kv_loads counter\n"
            'vllm:nixl_kv_loads_total{engine="0"} 7.0\n'
            'vllm:nixl_kv_loads_total{engine="1"} 2.0\n'
            'vllm:nixl_kv_offers_total{engine="1"} 1.0\n'
            'vllm:nixl_kv_loads_created{engine="0"} 1.7e+09\n'
            'vllm:nixl_kv_loads_verified_total{engine="0"} 7.0\n',
            {("0", None): 7.0, ("1", None): 3.0},
            id="vLLM and Dynamo",
        ),
        pytest.param(
            'ray_vllm_nixl_kv_loads{ReplicaId="a",engine="0"} 3.0\n'
            'ray_vllm_nixl_kv_loads{ReplicaId="b",engine="0"} 4.0\n',
            {("0", "a"): 3.0, ("0", "b"): 4.0},
            id="Ray",
        ),
    ],
)
def test_counters_are_found_under_each_platforms_name_by_engine(
    metrics: str, expected: dict[tuple[str | None, ...], float]
) -> None:
    assert count(metrics, "offers", "loads") == expected
