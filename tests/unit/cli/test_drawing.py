"""The picture of `nixl-kv plan --svg`."""

import re
import sys
from pathlib import Path
from typing import Any, Final, TypeAlias
from xml.etree import ElementTree as ET

import pytest

from nixl_kv.cli import main
from support.nixl_kv_command import hybrid_model, nixl_kv, plan_figures, plan_qwen

SVG: Final = "{http://www.w3.org/2000/svg}"
ONE_TO_TWO: Final = "--prefill tp=1,block=16 --decode tp=2,block=16"
LENGTH: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
COLOURS: Final = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)
"""Of matplotlib, by decode rank."""

CASES: Final = [
    pytest.param(ONE_TO_TWO, id="one to two"),
    pytest.param("--prefill tp=16,block=16 --decode tp=2,pp=2,block=48", id="copies"),
    pytest.param("--prefill tp=1,layout=LBNHC,block=64 --decode tp=16", id="many pieces"),
    pytest.param("--window 512 --sliding 2:1 --prefill pp=5 --decode tp=2", id="groups"),
    pytest.param("--prefill block=496 --decode block=16", id="very unequal blocks"),
]


pytest.importorskip("matplotlib")

Case: TypeAlias = tuple[ET.Element, dict[str, Any]]


def draw(options: str, path: Path) -> ET.Element:
    assert plan_qwen(options, f"--svg {path}").exit_code == 0
    return ET.parse(path).getroot()  # noqa: S314 - our own


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def fill(path: ET.Element) -> str:
    return path.get("style", "").partition("fill: ")[2].partition(";")[0]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A picture, and the figures that it shows."""
    path = tmp_path_factory.mktemp("drawing") / "plan.svg"
    return draw(request.param, path), plan_figures(request.param)


def test_picture_shows_all_ranks_and_what_they_read(case: Case) -> None:
    root, figures = case
    links, words = figures["links"], texts(root)
    assert {"Who reads what from whom", "prefill", "decode"} <= set(words)
    decode_ranks = {link["reader"] for link in links}
    prefill_ranks = {link["source"] for link in links + figures["unread"]}
    captions = [text for text in words if text.startswith("rank ")]
    assert len(captions) == len(prefill_ranks) + len(decode_ranks)
    ribbons = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("id", "").startswith("prefill-"):
            (path,) = group.iter(f"{SVG}path")
            ribbons[group.get("id")] = path.get("d", "").count("M"), fill(path)
    assert ribbons == {
        f"prefill-{link['source']}-decode-{link['reader']}": (
            len(link["heads"]),
            COLOURS[link["reader"] % len(COLOURS)],
        )
        for link in links
    }
    used = {fill(path) for path in root.iter(f"{SVG}path")}
    assert used >= {COLOURS[rank % len(COLOURS)] for rank in decode_ranks}
    assert ("read by nobody" in words) == bool(figures["unread"])


def test_all_is_inside_the_picture(case: Case) -> None:
    root, _ = case
    width, height = (float(root.get(name, "").removesuffix("pt")) for name in ("width", "height"))
    for path in root.iter(f"{SVG}path"):
        lengths = [float(length) for length in LENGTH.findall(path.get("d", ""))]
        assert 0 <= min(lengths[0::2]) <= max(lengths[0::2]) <= width
        assert 0 <= min(lengths[1::2]) <= max(lengths[1::2]) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", "")) <= width
        assert 0 <= float(text.get("y", "")) <= height


def test_a_rank_without_kv_is_drawn_with_its_states(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    numbers = "--prefill tp=2,block=128 --decode pp=2,block=128"
    model = f"--model-config {hybrid_model(tmp_path)}"
    assert nixl_kv("plan", model, numbers, f"--svg {path}").exit_code == 0
    root = ET.parse(path).getroot()  # noqa: S314 - our own
    captions = [text for text in texts(root) if text.startswith("rank ")]
    assert captions == [
        "rank 0: layers 0-3, heads 0-1, blocks of 384",
        "rank 1: layers 0-3, heads 2-3, blocks of 384",
        "rank 0: layers 0-1, heads 0-1 or 0-3, blocks of 1",
        "rank 1: layers 2-3, heads 0-3, blocks of 384",
    ]
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[0] == "decode rank 0 reads prefill rank 0: 20 runs of states"


def test_equal_pictures_are_equal_files(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.svg", "other.svg")]
    for path in paths:
        draw(ONE_TO_TWO, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(("tp", "shown"), [(2, 2), (16, 0)])
def test_words_are_on_a_few_ribbons_only(tp: int, shown: int, tmp_path: Path) -> None:
    root = draw(f"--prefill tp=1 --decode tp={tp}", tmp_path / "plan.svg")
    assert sum("for each block" in text for text in texts(root)) == shown
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[0] == "decode rank 0 reads prefill rank 0: " + (
        "36 runs of 32 KiB for each block" if tp == 2 else "36 runs of 8 KiB for each block"
    )
    assert len(titles) == tp


def test_memory_of_a_block_is_drawn_piece_by_piece(tmp_path: Path) -> None:
    words = texts(draw(ONE_TO_TWO, tmp_path / "plan.svg"))
    assert words[words.index("One block in the memory of prefill rank 0") + 1] == (
        "72 pieces, 2.25 MiB"
    )
    assert words[words.index("One block in the memory of decode rank 0") + 1] == (
        "36 pieces, 1.12 MiB"
    )


def test_picture_that_cannot_be_written_exits_2(tmp_path: Path) -> None:
    result = plan_qwen(ONE_TO_TWO, f"--svg {tmp_path}/missing/plan.svg")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --svg {tmp_path}/missing/plan.svg: ")


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "nixl_kv.cli.drawing", raising=False)
    monkeypatch.delattr(main.__package__ + ".drawing", raising=False)
    result = plan_qwen(ONE_TO_TWO, f"--svg {tmp_path}/plan.svg")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --svg needs matplotlib: install the extra `plot`, pip install 'nixl_kv[plot]'\n"
    )
    assert not (tmp_path / "plan.svg").exists()
