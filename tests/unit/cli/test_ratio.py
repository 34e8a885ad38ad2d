"""`nixl-kv plan --rate`: how many prefill and decode engines a load needs, and why."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv.cli.ratio import PREFILL_SHARE, Capacity, Load, Ratio
from support.documented import DOCS
from support.nixl_kv_command import nixl_kv

MEASURED = Capacity(prefill_tokens=37_000, decode_streams=40, gap_ms=15)
OPTIONS = "--prefill-tokens 37000 --decode-streams 40 --gap-ms 15"

POSITIVE = st.floats(1e-3, 1e6)
RATIOS = st.builds(
    Ratio,
    st.builds(Load, POSITIVE, POSITIVE, POSITIVE),
    st.builds(Capacity, POSITIVE, POSITIVE, POSITIVE),
)


@pytest.mark.parametrize(
    ("rate", "ratio"),
    [
        pytest.param(4, (1, 1), id="4"),
        pytest.param(6, (2, 1), id="6"),
        pytest.param(9, (2, 1), id="9"),
        pytest.param(12, (3, 1), id="12"),
    ],
)
def test_prompts_of_4600_tokens_need_the_engines_that_served_them(
    rate: float, ratio: tuple[int, int]
) -> None:
    """Answers of 128 tokens; runs on H200s with the shape of an 8B model."""
    found = Ratio(Load(rate, 4600, 128), MEASURED)
    assert (found.prefill, found.decode) == ratio


@given(RATIOS)
def test_the_engines_are_enough_and_one_less_is_not(ratio: Ratio) -> None:
    busy = ratio.prefill_tokens / ratio.capacity.prefill_tokens
    assert busy <= PREFILL_SHARE * ratio.prefill * (1 + 1e-6)
    assert ratio.prefill == 1 or busy > PREFILL_SHARE * (ratio.prefill - 1)
    answers = ratio.streams / ratio.capacity.decode_streams
    assert answers <= ratio.decode * (1 + 1e-6)
    assert ratio.decode == 1 or answers > ratio.decode - 1


@given(RATIOS, st.floats(1, 100))
def test_the_rate_changes_the_engines_and_not_the_ratio(ratio: Ratio, factor: float) -> None:
    load = ratio.load
    more = Ratio(Load(load.rate * factor, load.prompt, load.answer), ratio.capacity)
    assert math.isclose(more.prefill_for_each_decode, ratio.prefill_for_each_decode)
    assert more.prefill >= ratio.prefill
    assert more.decode >= ratio.decode


def test_the_command_gives_the_ratio_and_the_reason() -> None:
    result = nixl_kv("plan --rate 9 --prompt 4600 --answer 128", OPTIONS)
    assert result.exit_code == 0
    first, prefill, decode, more = result.stdout.splitlines()
    assert first == "2 prefill engines and 1 decode engine (2:1)"
    assert "41,400 prompt tokens per second need 1.6 engines" in prefill
    assert "17.3 answers at once need 0.43 engines" in decode
    assert more == "More such requests need 3.7 prefill engines for each decode engine."
    result = nixl_kv("plan --rate 9 --prompt 500 --answer 500", OPTIONS)
    assert result.stdout.splitlines()[0] == "1 prefill engine and 2 decode engines (1:2)"
    assert "decode engines for each prefill engine." in result.stdout


def test_the_same_as_json() -> None:
    result = nixl_kv("plan --rate 9 --prompt 4600 --answer 128 --json", OPTIONS)
    assert json.loads(result.stdout) == {
        "prefill": 2,
        "decode": 1,
        "prefill_needed": pytest.approx(1.598, abs=1e-3),
        "decode_needed": pytest.approx(0.432),
        "prefill_tokens_per_second": pytest.approx(41_400),
        "answers_at_once": pytest.approx(17.28),
    }


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param("", "missing: --prefill-at, --decode-at; give", id="nothing"),
        pytest.param("--prefill-at h:1", "missing: --decode-at; give", id="one address"),
        pytest.param("--rate 1", "missing: --prompt, --answer, --prefill-tokens, ", id="rate"),
        pytest.param("--gap-ms 1", "missing: --rate, ", id="gap"),
        pytest.param("--rate 1 --decode-at h:1", "--decode-at is given; allowed: not", id="both"),
        pytest.param(f"--rate 0 --prompt 1 --answer 1 {OPTIONS}", "--rate is 0; allowed", id="0"),
        pytest.param(f"--rate 1 --prompt -1 --answer 1 {OPTIONS}", "--prompt is -1", id="less"),
        pytest.param(f"--rate 1 --prompt 1 --answer nan {OPTIONS}", "--answer is nan", id="nan"),
        pytest.param(f"--rate inf --prompt 1 --answer 1 {OPTIONS}", "--rate is inf", id="inf"),
    ],
)
def test_bad_options_exit_2_and_are_named(arguments: str, error: str) -> None:
    result = nixl_kv(f"plan {arguments}")
    assert result.exit_code == 2
    assert error in result.stderr


def test_documented_output_is_what_the_command_prints() -> None:
    (block,) = (DOCS / "goodput.md").read_text(encoding="utf-8").split("```")[1::2]
    _, command, shown = block.split("\n", 2)
    result = nixl_kv(command.removeprefix("$ nixl-kv "))
    assert result.exit_code == 0
    assert result.stdout.split() == shown.split()
