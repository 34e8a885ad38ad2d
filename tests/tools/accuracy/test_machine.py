"""What the launcher runs on, and which GPUs each engine gets."""

import sys
from types import SimpleNamespace

import pytest

from lab.accuracy.machine import assign, detect, members


@pytest.mark.parametrize(
    ("available", "env", "gpus"),
    [
        (True, {}, ("0", "1")),
        (True, {"CUDA_VISIBLE_DEVICES": "5, 3"}, ("5", "3")),
        (False, {"CUDA_VISIBLE_DEVICES": "5"}, ()),
    ],
    ids=["numbers", "names", "none"],
)
def test_gpus_have_the_names_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], gpus: tuple[str, ...], *, available: bool
) -> None:
    cuda = SimpleNamespace(is_available=lambda: available, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    machine = detect(env)
    assert machine.gpus == gpus
    assert machine.device == ("cuda" if available else "cpu")


@pytest.mark.parametrize("count", range(2, 9))
def test_no_engine_gets_a_gpu_twice_and_none_is_idle_while_another_has_two(count: int) -> None:
    gpus = [str(number) for number in range(count)]
    given = assign(gpus, [2, 1, 2, 2])
    assert [len(set(mine)) for mine in given] == [2, 1, 2, 2]
    used = [gpu for mine in given for gpu in mine]
    shares = [used.count(gpu) for gpu in gpus]
    assert max(shares) - min(shares) <= 1


def test_members_of_an_enumeration_are_read_from_its_source() -> None:
    source = (
        'class A(Enum):\n    X = 1\nclass B(Enum):\n    """Doc."""\n    Y = "y"\n    Z = (\n1)\n'
    )
    assert members(source, "B") == ["Y", "Z"]
