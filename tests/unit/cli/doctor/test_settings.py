"""Checks of an engine's settings, its key and its address."""

import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from nixl_kv.cli.doctor import settings
from nixl_kv.cli.doctor.report import Check
from nixl_kv.cli.doctor.settings import Setup
from nixl_kv.config import Config
from nixl_kv.keys import read_key_file, write_key_file

OURS = {"kv_connector": "NixlKVConnector", "kv_role": "kv_both"}
MODULE = {"kv_connector_module_path": "nixl_kv.connector"}


def verdicts(checks: Iterable[Check]) -> list[tuple[str, str]]:
    return [(check.name, check.verdict) for check in checks if check.verdict != "ok"]


def checked(value: Any, environ: dict[str, str] | None = None) -> list[Check]:
    setup = Setup.parse(None if value is None else json.dumps(value))
    config = settings.read_config(setup, environ or {})
    return list(settings.check_settings(setup, config, environ or {}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "--config is not JSON: Expecting"),
        ("[]", "--config is list; allowed: a JSON object"),
        ('{"kv_role": "kv_both", "kv_connector_extra_config": 3}', "is 3; allowed: a JSON object"),
    ],
)
def test_what_is_no_configuration_is_bad_input(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="allowed") as raised:
        Setup.parse(text)
    assert words in str(raised.value)


FORK = {"read_validation_timeout": 30, "theirs": 4}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, [("--kv-transfer-config", "skipped")], id="nothing"),
        pytest.param({**OURS, **MODULE}, [], id="good"),
        pytest.param(OURS, [], id="by the plugin"),
        pytest.param({"offer_ttl_s": 5}, [], id="extra alone"),
        pytest.param({"kv_lease_duration": 5}, [], id="foreign key that counts"),
        pytest.param({"num_threads": 4}, [("settings", "warning")], id="foreign key"),
        pytest.param({"theirs": 4}, [("settings", "error")], id="unknown key"),
        pytest.param(
            {**OURS, **MODULE, "kv_connector": "NixlConnector", "kv_connector_extra_config": FORK},
            [("settings", "warning")] * 2,
            id="keys of a fork",
        ),
        pytest.param({"ofer_ttl_s": 5}, [("settings", "error")], id="misspelt key"),
        pytest.param({**OURS, "kv_role": "prefill"}, [("kv_role", "error")], id="role"),
        pytest.param(
            {**OURS, "kv_connector": "NixlConnector"}, [("kv_connector", "error")], id="vLLM's own"
        ),
        pytest.param(
            {**OURS, "kv_connector": "LMCacheConnectorV1"}, [("kv_connector", "error")], id="other"
        ),
        pytest.param(
            {**OURS, "kv_connector_module_path": "nixl_kv.conector"},
            [("kv_connector_module_path", "error")],
            id="misspelt module",
        ),
        pytest.param(
            {**OURS, "kv_load_failure_policy": "fail"},
            [("kv_load_failure_policy", "warning")],
            id="policy",
        ),
        pytest.param(
            {**OURS, "kv_connector_extra_config": {"backends": ["UCXX"]}},
            [("backends", "error")],
            id="backend",
            marks=pytest.mark.nixl,
        ),
        pytest.param(
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [
                        {"kv_connector": "OffloadingConnector"},
                        {**OURS, "kv_connector_extra_config": {"verify": "some"}},
                    ]
                },
            },
            [("settings", "error")],
            id="child",
        ),
    ],
)
def test_settings_are_judged_before_an_engine_starts(
    value: Any, expected: list[tuple[str, str]]
) -> None:
    found = checked(value)
    assert verdicts(found) == expected
    if value == {"ofer_ttl_s": 5}:
        assert "did you mean 'offer_ttl_s'?" in found[-1].detail, "what the engine would say"


@pytest.mark.parametrize("plugins", ["lora", "", "nixl_kv_other", "lora,my_nixl_kv", "nixl-kv"])
def test_a_plugin_that_vllm_does_not_load_is_an_error(plugins: str) -> None:
    found = checked(OURS, {"VLLM_PLUGINS": plugins})
    assert verdicts(found) == [("kv_connector", "error")]
    assert verdicts(checked(OURS, {"VLLM_PLUGINS": f"{plugins},nixl_kv"})) == []


# --- the key


def key_checks(given: Path | None = None, *, insecure: bool = False, **extra: Any) -> list[Check]:
    config = Config.parse({**extra, "insecure": insecure}, {})
    return settings.check_key(config, given, insecure=insecure)[1]


def test_a_key_is_known_by_its_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(path)
    for checks in (key_checks(path), key_checks(key_file=str(path))):
        (check,) = checks
        assert check.verdict == "ok"
        assert read_key_file(path).fingerprint in check.detail
        assert path.read_text().strip() not in check.detail
    path.chmod(0o644)
    keys, (check,) = settings.check_key(None, path, insecure=False)
    assert (keys, check.verdict) == (None, "error")
    assert "its mode is 0644" in check.detail


def test_no_key_is_a_warning_beyond_this_machine() -> None:
    assert verdicts(key_checks(insecure=True)) == []
    far = key_checks(insecure=True, host="192.0.2.1")
    assert verdicts(far) == [("key", "warning")]


# --- the address


def address_checks(peers: tuple[str, ...] = (), role: str = "kv_both", **extra: Any) -> list[Check]:
    config, setup = Config.parse(extra, {}), Setup.parse(json.dumps({**OURS, "kv_role": role}))
    return list(settings.check_address(config, None, peers, is_prefill=setup.is_prefill))


def test_a_port_that_another_process_has_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = address_checks(port=port)
    (check,) = [each for each in found if each.fix]
    assert (check.name, check.verdict) == ("port", "error")
    assert f"{port} of 127.0.0.1 is in use by " in check.detail
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in str(check.fix)
    assert verdicts(address_checks(port=port)) == []  # free again


def test_a_foreign_address_is_an_error() -> None:
    found = address_checks(host="192.0.2.1", insecure=True)
    assert verdicts(found) == [("host", "error")]


def test_tickets_that_name_loopback_reach_no_other_host() -> None:
    """A decode engine makes no tickets."""
    found = address_checks(("192.0.2.7:5600",), port=0)
    assert ("host", "error") in verdicts(found)
    found = address_checks(("192.0.2.7:5600",), "kv_consumer", port=0)
    assert ("host", "error") not in verdicts(found)
    assert ("host", "error") not in verdicts(address_checks(("127.0.0.1:5600",), port=0))


def test_another_route_than_the_ticket_says_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.addresses, "towards", lambda _: "192.0.2.2")
    monkeypatch.setattr(settings.addresses, "is_local", lambda host: host == "192.0.2.1")
    found = address_checks(("192.0.2.7:5600",), host="192.0.2.1", insecure=True, port=0)
    (check,) = [each for each in found if each.fix]
    assert (check.name, check.verdict) == ("route to 192.0.2.7", "warning")
    assert check.detail == "packets leave from 192.0.2.2, but tickets would name 192.0.2.1"


def test_no_route_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def towards(_: str) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(settings.addresses, "towards", towards)
    found = address_checks(("192.0.2.7:5600",), "kv_consumer", port=0)
    assert verdicts(found) == [("route to 192.0.2.7", "error")]


def test_a_rank_port_in_use_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = address_checks(port=0, rank_port=server.getsockname()[1])
    assert verdicts(found) == [("rank_port", "warning")]
