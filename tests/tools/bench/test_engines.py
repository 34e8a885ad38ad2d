"""Benchmarks of vLLM's engines: what they ask, and what they make of the answers."""

import itertools

from lab.bench import floor, load
from lab.bench.__main__ import parse_arguments
from lab.bench.floor import Sample


def test_floor_compares_each_round_with_itself() -> None:
    off = [Sample(0.020, 0.010, 0.001), Sample(0.040, 0.020, 0.002), Sample(0.050, 0.040, 0.003)]
    verified = [Sample(one.leg + 0.005, one.hit, one.transfer) for one in off]
    row = floor.figures({"off": off, "all": verified})
    rounded = {heading: round(float(figure), 6) for heading, figure in row.items()}
    assert rounded == {
        "leg ms": 40,
        "hit ms": 20,
        "leg over hit ms": 10,
        "transfer ms": 2,
        "verified leg ms": 45,
        "verify adds ms": 5,
    }


def test_no_two_prompts_begin_alike() -> None:
    first, again, other = (floor.prompt(40, seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first[:16] != other[:16]


def test_vllms_client_asks_for_what_the_options_say() -> None:
    options = parse_arguments(["load", "--seconds", "10", "--prompt-tokens", "700", "--seed", "3"])
    command = load.client_command("http://router", 2.5, options)
    given = dict(itertools.pairwise(command))
    assert given["--base-url"] == "http://router"
    assert given["--request-rate"] == "2.5"
    assert given["--num-prompts"] == "25"
    assert given["--random-input-len"] == "700"
    assert given["--seed"] == "3"


def test_result_of_vllms_client_is_read_by_our_headings() -> None:
    row = load.figures(
        {
            "completed": 3,
            "total_input_tokens": 30,
            "p50_ttft_ms": 1.0,
            "p99_ttft_ms": 2.0,
            "p50_itl_ms": 3.0,
            "p99_itl_ms": 4.0,
            "itls": [[0.001, 0.005], []],
            "output_throughput": 9.0,
        }
    )
    assert (row["requests"], row["prompt tokens"], row["gap max ms"]) == (3, 10, 5)
