"""Whether the hub answers, and what of it is on this machine."""

from pathlib import Path

import pytest

from lab.accuracy import hub
from lab.accuracy.hub import HuggingFace
from lab.accuracy.settings import SettingError


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"HF_HUB_OFFLINE": "1"}, id="offline"),
        pytest.param({"HF_ENDPOINT": "", "HF_HUB_OFFLINE": "1"}, id="offline, empty endpoint"),
        pytest.param({"HF_ENDPOINT": "http://127.0.0.1:9"}, id="nobody listens"),
    ],
)
def test_hub_is_not_reachable(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    assert not HuggingFace(env).is_reachable()


@pytest.mark.parametrize("endpoint", ["hub", "file:///", "http://a:b", "http://[::1", "http://a b"])
def test_endpoint_that_is_no_url_is_named(endpoint: str) -> None:
    with pytest.raises(SettingError) as raised:
        HuggingFace({"HF_ENDPOINT": endpoint}).is_reachable()
    assert str(raised.value).startswith(f"HF_ENDPOINT={endpoint}: allowed is a URL")


def test_empty_endpoint_is_that_of_the_hub_and_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def has_web_server(url: str) -> bool:
        asked.append(url)
        return False

    monkeypatch.setattr(hub, "has_web_server", has_web_server)
    huggingface = HuggingFace({"HF_ENDPOINT": ""})
    assert [huggingface.is_reachable() for _ in range(2)] == [False, False]
    assert asked == ["https://huggingface.co"]


def test_data_set_may_be_in_the_cache(tmp_path: Path) -> None:
    cached = HuggingFace({"HF_HOME": str(tmp_path)})
    assert not cached.has_data_set()
    (tmp_path / "datasets" / "openai___gsm8k").mkdir(parents=True)
    assert cached.has_data_set()
