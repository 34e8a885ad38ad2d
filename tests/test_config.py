"""`kv_connector_extra_config`: what is taken, what is refused, and in which words."""

import socket
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from nixl_kv.config import HOST_VARIABLE, LAYOUTS, PORT_VARIABLE, Config
from nixl_kv.errors import ConfigError

NO_HOST = "an IP address of this machine, or a name that resolves to one; not a wildcard"
NO_PORT = r"a whole number from 0 to 65535 \(0: any free port\)"
NO_BACKENDS = r"a list of names of NIXL backends, such as \['UCX'\]"
NO_SECONDS = "a number of seconds from 0.1 to 3600"
NO_LAYOUT = "auto, LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A name service with these names; literals need none."""
    known: dict[str, str] = {}
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **options: Any) -> Any:
        literal = known.get(host, host)
        return real(literal, *args, **options, flags=socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def test_defaults() -> None:
    config = Config.parse({}, {})
    assert config == Config()
    assert config == Config(
        host="127.0.0.1",
        port=5600,
        backends=("UCX",),
        offer_ttl_s=10.0,
        lease_s=5.0,
        request_timeout_s=30.0,
        layout="auto",
    )


def test_everything_given() -> None:
    config = Config.parse(
        {
            "host": "10.1.2.3",
            "port": 7000,
            "backends": ["UCX", "GDS"],
            "offer_ttl_s": 1,
            "lease_s": 2.5,
            "request_timeout_s": 60,
            "layout": "BHLNC",
        },
        {},
    )
    assert config == Config(
        host="10.1.2.3",
        port=7000,
        backends=("UCX", "GDS"),
        offer_ttl_s=1.0,
        lease_s=2.5,
        request_timeout_s=60.0,
        layout="BHLNC",
    )
    assert isinstance(config.offer_ttl_s, float)


def test_a_config_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


def test_renewals_per_lease() -> None:
    assert Config(lease_s=5.0).renew_interval_s == 1.0
    assert Config(lease_s=0.5).renew_interval_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        pytest.param("port", 0, 0, id="any free port"),
        pytest.param("port", 65535, 65535, id="highest port"),
        pytest.param("host", "::1", "::1", id="IPv6"),
        pytest.param("host", "0:0::0:1", "::1", id="IPv6 in another spelling"),
        pytest.param("host", "prefill", "10.0.0.7", id="name"),
        pytest.param("backends", ("POSIX",), ("POSIX",), id="tuple of backends"),
        pytest.param("lease_s", 0.1, 0.1, id="shortest"),
        pytest.param("lease_s", 3600, 3600.0, id="longest"),
        *[pytest.param("layout", name, name, id=name) for name in LAYOUTS],
    ],
)
def test_allowed(names: dict[str, str], key: str, value: object, parsed: object) -> None:
    names["prefill"] = "10.0.0.7"
    found = getattr(Config.parse({key: value}, {}), key)
    assert found == parsed
    assert type(found) is type(parsed)


SECONDS = ("offer_ttl_s", "lease_s", "request_timeout_s")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        *[
            pytest.param("host", value, NO_HOST, id=f"host {name}")
            for name, value in [
                ("empty", ""),
                ("missing", None),
                ("number", 127),
                ("bytes", b"127.0.0.1"),
                ("wildcard", "0.0.0.0"),  # noqa: S104 - refused
                ("short wildcard", "0"),
                ("IPv6 wildcard", "::"),
                ("multicast", "224.0.0.1"),
                ("IPv6 multicast", "ff02::1"),
                ("unknown", "no-such-name"),
                ("wildcard by name", "anywhere"),
                ("label too long", "x" * 64 + ".example"),
                ("with a port", "10.0.0.1:80"),
            ]
        ],
        *[
            pytest.param("port", value, NO_PORT, id=f"port {value!r}")
            for value in (-1, 65536, 5600.0, "5600", True, None, [1], float("nan"))
        ],
        *[
            pytest.param("backends", value, NO_BACKENDS, id=f"backends {value!r}")
            for value in ("UCX", [], (), [""], ["UCX", ""], ["UCX", 1], [None], None, {"UCX": 1})
        ],
        *[
            pytest.param(key, value, NO_SECONDS, id=f"{key} {value!r}")
            for key in SECONDS
            for value in (0, 0.0999, -1, 3600.001, "5", None, True, [5], 10**18)
        ],
        *[
            pytest.param("lease_s", float(value), NO_SECONDS, id=f"lease_s {value}")
            for value in ("nan", "inf", "-inf")
        ],
        pytest.param("lease_s", 10**400, NO_SECONDS, id="lease_s beyond a double"),
        *[
            pytest.param("layout", value, NO_LAYOUT, id=f"layout {value!r}")
            for value in ("", "lbhnc", "NHD", None, 5, ["auto"])
        ],
    ],
)
def test_refused(names: dict[str, str], key: str, value: object, allowed: str) -> None:
    names["anywhere"] = "0.0.0.0"  # noqa: S104 - refused
    with pytest.raises(ConfigError, match=rf"allowed: {allowed}$") as refusal:
        Config.parse({key: value}, {})
    assert str(refusal.value).startswith(f"kv_connector_extra_config[{key!r}] is {value!r}; ")


@pytest.mark.parametrize(
    ("extra", "first"),
    [
        pytest.param({"prot": 5600}, "'prot' (value 5600)", id="one"),
        pytest.param({"z": 1, "port": 1, "b": None}, "'b' (value None)", id="the first by name"),
        pytest.param({"Port": 1}, "'Port' (value 1)", id="capitals"),
        pytest.param({"renew_interval_s": 1}, "'renew_interval_s' (value 1)", id="derived"),
    ],
)
def test_unknown_keys(extra: dict[str, object], first: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config.parse(extra, {})
    keys = "host, port, backends, offer_ttl_s, lease_s, request_timeout_s, layout"
    assert str(refusal.value) == (
        f"kv_connector_extra_config has the unknown key {first}; allowed keys are {keys}"
    )
    assert keys == ", ".join(field.name for field in fields(Config))


@pytest.mark.parametrize(
    ("extra", "environ", "host", "port"),
    [
        pytest.param({}, {HOST_VARIABLE: "10.9.8.7"}, "10.9.8.7", 5600, id="host"),
        pytest.param({}, {PORT_VARIABLE: "6000"}, "127.0.0.1", 6000, id="port"),
        pytest.param({}, {PORT_VARIABLE: "0"}, "127.0.0.1", 0, id="port zero"),
        pytest.param(
            {}, {HOST_VARIABLE: "10.9.8.7", PORT_VARIABLE: "6000"}, "10.9.8.7", 6000, id="both"
        ),
        pytest.param(
            {"host": "10.1.1.1", "port": 7},
            {HOST_VARIABLE: "10.9.8.7", PORT_VARIABLE: "6000"},
            "10.1.1.1",
            7,
            id="keys come first",
        ),
        pytest.param(
            {"host": "10.1.1.1", "port": 7},
            {HOST_VARIABLE: "0.0.0.0", PORT_VARIABLE: "none"},  # noqa: S104 - not used
            "10.1.1.1",
            7,
            id="what is not used is not checked",
        ),
        pytest.param({}, {HOST_VARIABLE: "", PORT_VARIABLE: ""}, "127.0.0.1", 5600, id="empty"),
        pytest.param({}, {"PORT": "1", "HOST": "10.0.0.1"}, "127.0.0.1", 5600, id="others"),
    ],
)
def test_environment(
    extra: dict[str, object], environ: dict[str, str], host: str, port: int
) -> None:
    config = Config.parse(extra, environ)
    assert (config.host, config.port) == (host, port)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        *[
            pytest.param(PORT_VARIABLE, text, NO_PORT, id=f"port {text!r}")
            for text in ("65536", "-1", "5600 ", "http", "0x10", "1e3", "²")
        ],
        pytest.param(PORT_VARIABLE, "9" * 5000, NO_PORT, id="port of 5000 digits"),
        pytest.param(HOST_VARIABLE, "0.0.0.0", NO_HOST, id="wildcard"),  # noqa: S104 - refused
    ],
)
def test_environment_refused(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"allowed: {allowed}$"):
        Config.parse({}, {variable: value})


def test_the_variables_are_those_of_vllm() -> None:
    assert HOST_VARIABLE == "VLLM_NIXL_SIDE_CHANNEL_HOST"
    assert PORT_VARIABLE == "VLLM_NIXL_SIDE_CHANNEL_PORT"
