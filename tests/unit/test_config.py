"""`kv_connector_extra_config`: accepted and refused keys and values."""

import ipaddress
import socket
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_kv import addresses
from nixl_kv.config import (
    FOREIGN_KEYS,
    HOST_VARIABLE,
    HOW_TO_SHARE_A_KEY,
    KEY_VARIABLE,
    LEASE_KEY,
    PORT_VARIABLE,
    AllowedHosts,
    Config,
    Layout,
    foreign_key_lines,
)
from nixl_kv.errors import ConfigError

NO_HOST = (
    "'auto', an IP address or a network interface of this machine, or a name that resolves to one; "
    "not a wildcard"
)
NO_PORT = r"a whole number from 0 to 65535 \(0: any free port\)"
NO_BACKENDS = r"a list of names of NIXL backends, such as \['UCX'\]"
NO_SECONDS = "a number of seconds from 0.1 to 3600"
NO_KEY_FILE = "the path of a file made by `nixl-kv keygen`, or null"
NO_VERIFY = "'off', 'all', or 'sample:RATE' with RATE from 0 to 1"
NO_PEERS = r"a list of CIDRs, such as \['10.0.0.0/24', 'fd00::/64'\], or null"
NO_LABEL = "up to 256 printable characters, such as the trainer's step"
LAYOUTS = get_args(Layout)
NO_LAYOUT = " or ".join(map(repr, LAYOUTS))
NO_PAIR_IDS = "'off' or 'kv_request_id' or 'request_id'"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A name service with these names; literals need none."""
    known: dict[str, str] = {}
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **options: Any) -> Any:
        options["flags"] = socket.AI_NUMERICHOST
        return real(known.get(host, host), *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


def test_a_lease_is_renewed_five_times_and_each_second_at_least() -> None:
    assert Config(lease_s=5.0).heartbeat_interval_s == 0.8
    assert Config(lease_s=60.0).heartbeat_interval_s == 0.8
    assert Config(lease_s=0.5).heartbeat_interval_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        pytest.param("port", 0, 0, id="any free port"),
        pytest.param("port", 65535, 65535, id="highest port"),
        pytest.param("host", "0:0::0:1", "::1", id="IPv6 in another spelling"),
        pytest.param("host", "prefill", "10.0.0.7", id="name"),
        pytest.param("host", "lo9", "10.0.0.8", id="interface"),
        pytest.param("host", "auto", "10.0.0.9", id="the default route"),
        pytest.param("host", "::ffff:10.0.0.7", "10.0.0.7", id="IPv4 written as IPv6"),
        pytest.param("lease_s", 0.1, 0.1, id="shortest"),
        pytest.param("lease_s", 3600, 3600.0, id="longest"),
        *[pytest.param("layout", name, name, id=name) for name in LAYOUTS],
        pytest.param("key_file", "key", "key", id="key"),
        pytest.param("peers", None, None, id="default peers"),
        pytest.param("offer_share", 1, 1.0, id="largest share"),
        *[
            pytest.param("paced_reads", value, word, id=f"paced_reads {value}")
            for value, word in (("on", "on"), (True, "on"), (False, "off"))
        ],
        *[
            pytest.param("verify", value, share, id=f"verify {value}")
            for value, share in (
                ("off", 0.0),
                ("all", 1.0),
                ("sample:1", 1.0),
                ("sample:.5", 0.5),
                ("sample:0.000000001", 1e-9),
            )
        ],
    ],
)
def test_a_value_that_is_allowed_is_parsed(
    names: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: object,
    parsed: object,
) -> None:
    names["prefill"] = "10.0.0.7"
    monkeypatch.setattr(addresses, "is_interface", lambda name: name == "lo9")
    monkeypatch.setattr(addresses, "of_interface", lambda _name: "10.0.0.8")
    monkeypatch.setattr(addresses, "of_default_route", lambda: "10.0.0.9")
    result = getattr(Config.parse({"insecure": True, key: value}, {}), key)
    assert result == parsed
    assert type(result) is type(parsed)


SECONDS = (0, 0.0999, 3600.001, "5", None, True, [5], 10**400, float("nan"), float("inf"))
HOSTS = ("", None, 127, b"127.0.0.1", "0.0.0.0", "0", "::", "224.0.0.1", "ff02::1", "no-such-name")  # noqa: S104 - refused
ODD_HOSTS = ("anywhere", "::ffff:0.0.0.0", "x" * 64 + ".example", "10.0.0.1:80")
RATES = ("", ".", "1.", "1.01", "-0.1", "+1", "1e-3", "nan", "0.5 ", "0,5", "0.5\n", "\u0661")

REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "host": (NO_HOST, HOSTS + ODD_HOSTS),
    "port": (NO_PORT, (-1, 65536, 5600.0, "5600", True, None, [1], float("nan"))),
    "backends": (NO_BACKENDS, ("UCX", [], (), [""], ["UCX", 1], None, {"UCX": 1})),
    "offer_ttl_s": (NO_SECONDS, SECONDS),
    "lease_s": (NO_SECONDS, SECONDS),
    "kv_lease_duration": (NO_SECONDS, SECONDS[:2]),
    "hold_s": (NO_SECONDS, SECONDS[:2]),
    "wait_for_prefill_s": (NO_SECONDS, SECONDS[:2]),
    "request_timeout_s": (NO_SECONDS, SECONDS[:2]),
    "peer_timeout_s": (NO_SECONDS, SECONDS[:2]),
    "pair_ids": (NO_PAIR_IDS, ("", "on", "uuid", True, None, ["off"])),
    "layout": (NO_LAYOUT, ("", "lbhnc", "NHD", None, 5, ["auto"])),
    "weights": (NO_LABEL, (None, 7, "two\nlines", "x" * 257, ["a"])),
    "on_load_failure": ("'recompute' or 'fail'", ("", "Fail", True, None, ["fail"])),
    "key_file": (NO_KEY_FILE, ("", 5, True, ["key"], b"key", "a\0b")),
    "insecure": ("true or false", (None, 0, 1, "true", "", [])),
    "paced_reads": ("'auto' or 'on' or 'off'", ("", "Auto", "true", None, 0, 1, ["on"])),
    "offer_share": ("a number from 0.01 to 1", (0, 0.0099, 1.01, 50, "0.5", None, True)),
    "peers": (f"{NO_PEERS}(; .+)?", ("10.0.0.0/8", {"10.0.0.0/8": 1}, [""], ["prefill"])),
    "verify": (NO_VERIFY, (0, 1, 0.5, True, None, ["all"], "", "on", "All", "0.5", "sample")),
}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        *((key, value, allowed) for key, (allowed, values) in REFUSED.items() for value in values),
        *(("verify", f"sample:{rate}", NO_VERIFY) for rate in (*RATES, "0.0000000001", "0" * 19)),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_a_value_that_is_not_allowed_is_refused_with_key_and_what_is(
    names: dict[str, str], key: str, value: object, allowed: str
) -> None:
    names["anywhere"] = "0.0.0.0"  # noqa: S104 - refused
    why = r"(; it cannot be resolved: .+)?" if key == "host" else ""
    with pytest.raises(ConfigError, match=rf"allowed: {allowed}{why}$") as refusal:
        Config.parse({key: value}, {})
    assert str(refusal.value).startswith(f"kv_connector_extra_config[{key!r}] is {value!r}; ")


def test_a_name_that_cannot_be_resolved_is_refused_with_the_resolvers_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ConfigError, match=r"a wildcard; it cannot be resolved: Name or service"):
        Config.parse({"host": "prefill.svc"}, {})


@pytest.mark.parametrize(
    ("key", "close"),
    [("prot", "port"), ("Port", "port"), ("ofer_ttl_s", "offer_ttl_s"), ("key", None)],
)
def test_an_unknown_key_is_refused_with_the_known_ones(key: str, close: str | None) -> None:
    """`key` too: others would see it."""
    with pytest.raises(ConfigError) as refusal:
        Config.parse({key: "00"}, {})
    keys = (
        "host, port, rank_port, backends, offer_ttl_s, lease_s, hold_s, request_timeout_s, "
        "wait_for_prefill_s, pair_ids, layout, key_file, insecure, peers, peer_timeout_s, "
        "paced_reads, path, staging_mib, offer_share, weights, in_tree_decode, on_load_failure, "
        "in_tree_metrics, media, verify"
    )
    assert str(refusal.value) == (
        f"kv_connector_extra_config has the unknown key {key!r} (value '00'); "
        f"{f'did you mean {close!r}? ' if close else ''}allowed keys are {keys}"
    )
    assert keys == ", ".join(Config.parsers())


@pytest.mark.parametrize(
    ("extra", "environ", "host", "port"),
    [
        pytest.param({}, {HOST_VARIABLE: "10.9.8.7"}, "10.9.8.7", 5600, id="host"),
        pytest.param({}, {PORT_VARIABLE: "6000"}, "127.0.0.1", 6000, id="port"),
        pytest.param(
            {"host": "10.1.1.1", "port": 7},
            {HOST_VARIABLE: "0.0.0.0", PORT_VARIABLE: "none"},  # noqa: S104 - not used
            "10.1.1.1",
            7,
            id="keys come first, and then these are not checked",
        ),
        pytest.param({}, {HOST_VARIABLE: "", PORT_VARIABLE: ""}, "127.0.0.1", 5600, id="empty"),
        *[
            pytest.param({}, {HOST_VARIABLE: every}, "10.0.0.9", 5600, id=f"auto {every}")
            for every in ("0.0.0.0", "::")  # noqa: S104 - not listened to
        ],
    ],
)
def test_vllms_variables_are_the_defaults_of_host_and_port(
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, object],
    environ: dict[str, str],
    host: str,
    port: int,
) -> None:
    """A wildcard means the address of the default route."""
    monkeypatch.setattr(addresses, "of_default_route", lambda: "10.0.0.9")
    config = Config.parse({**extra, "insecure": True}, environ)
    assert (config.host, config.port) == (host, port)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        *((PORT_VARIABLE, text, NO_PORT) for text in ("65536", "-1", "5600 ", "0x10", "²")),
        (PORT_VARIABLE, "9" * 5000, NO_PORT),
        (HOST_VARIABLE, "224.0.0.1", NO_HOST),
    ],
    ids=lambda value: f"{value:.20}",
)
def test_a_variable_with_a_value_that_is_not_allowed_is_refused(
    variable: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=rf"allowed: {allowed}$"):
        Config.parse({}, {variable: value})


# Keys and peers


OUR_HOST = "kv_connector_extra_config['host']"


@pytest.mark.parametrize(
    ("extra", "environ", "name"),
    [
        pytest.param({"host": "10.0.0.1"}, {}, OUR_HOST, id="key"),
        pytest.param({}, {HOST_VARIABLE: "10.0.0.1"}, HOST_VARIABLE, id="variable"),
        pytest.param({"host": "10.0.0.1", "peers": ["10.0.0.0/24"]}, {}, OUR_HOST, id="with peers"),
    ],
)
def test_what_other_machines_reach_needs_a_key(
    extra: dict[str, object], environ: dict[str, str], name: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config.parse(extra, environ)
    assert str(refusal.value) == (
        f"{name} is '10.0.0.1'; allowed: without key_file and NIXL_KV_KEY, an address that only "
        f"this machine reaches: {HOW_TO_SHARE_A_KEY}"
    )
    for allowed in ({"key_file": "key"}, {"insecure": True}):
        Config.parse({**extra, **allowed}, environ)


@pytest.mark.parametrize("host", ["::1", "::ffff:127.0.0.1"])
def test_what_only_this_machine_reaches_needs_no_key(host: str) -> None:
    Config.parse({"host": host}, {})


def test_a_key_may_come_from_the_environment_and_is_not_shown() -> None:
    config = Config.parse({"host": "10.0.0.1"}, {KEY_VARIABLE: "00ff"})
    assert config.has_key
    assert config.allowed_hosts.allows("8.8.8.8")
    assert config.key == "00ff"
    assert "00ff" not in repr(config)
    assert Config.parse({}, {KEY_VARIABLE: ""}) == Config()


# Keys of vLLM's own connector

WITHOUT_EFFECT = sorted(FOREIGN_KEYS.keys() - {LEASE_KEY})
COUNTS = (
    "kv_connector_extra_config['kv_lease_duration'] counts as 'offer_ttl_s', unless that is set"
)


@pytest.mark.parametrize(
    ("extra", "seconds", "lines"),
    [
        pytest.param({}, 10.0, [], id="none"),
        pytest.param({"kv_lease_duration": 45}, 45.0, [COUNTS], id="one that means something"),
        pytest.param(
            {"kv_lease_duration": 45, "offer_ttl_s": 5}, 5.0, [COUNTS], id="ours comes first"
        ),
        pytest.param(
            dict.fromkeys(WITHOUT_EFFECT),
            10.0,
            [f"kv_connector_extra_config[{key!r}] {FOREIGN_KEYS[key]}" for key in WITHOUT_EFFECT],
            id="those that mean nothing",
        ),
    ],
)
def test_keys_of_vllms_own_connector_are_understood(
    extra: dict[str, object], seconds: float, lines: list[str]
) -> None:
    assert Config.parse(extra, {}).offer_ttl_s == seconds
    assert foreign_key_lines(extra) == lines


@pytest.mark.parametrize(
    ("cidr", "words"),
    [("10.0.0.0/33", "does not appear to be"), ("10.0.0.1/8", "has host bits set")],
)
def test_the_peer_that_is_no_cidr_is_named(cidr: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{NO_PEERS}; .*{cidr}.* {words}"):
        Config.parse({"peers": ["10.0.0.0/8", cidr]}, {})


KEY = {"key_file": "key"}
BY_CIDR = {"peers": ["10.0.0.0/24", "fd00::/64", "192.168.7.7", "::ffff:172.16.0.0/108"]}


@pytest.mark.parametrize(
    ("extra", "host", "allowed"),
    [
        pytest.param(KEY, "8.8.8.8", True, id="a key: anybody"),
        pytest.param(KEY, "prefill", False, id="a key: no name"),
        pytest.param({}, "127.0.0.1", True, id="no key: this machine"),
        pytest.param({}, "::1", True, id="no key: this machine by IPv6"),
        pytest.param({}, "10.0.0.1", False, id="no key: no other host"),
        pytest.param({"host": "10.0.0.1", "insecure": True}, "10.0.0.1", True, id="own host"),
        pytest.param({"host": "10.0.0.1", "insecure": True}, "10.0.0.2", False, id="neighbour"),
        pytest.param(BY_CIDR, "10.0.0.255", True, id="inside"),
        pytest.param(BY_CIDR, "10.0.1.0", False, id="outside"),
        pytest.param(BY_CIDR, "fd00::ffff", True, id="inside, IPv6"),
        pytest.param(BY_CIDR, "fd00:0:0:1::", False, id="outside, IPv6"),
        pytest.param(BY_CIDR, "192.168.7.7", True, id="one host"),
        pytest.param(BY_CIDR, "127.0.0.1", False, id="a given list replaces the default"),
        pytest.param({**BY_CIDR, **KEY}, "8.8.8.8", False, id="with a key too"),
        pytest.param(BY_CIDR, "10.0.0.1/32", False, id="a network, not a host"),
        pytest.param(BY_CIDR, "10.1", False, id="short form"),
    ],
)
def test_which_hosts_are_allowed(extra: dict[str, object], host: str, allowed: bool) -> None:  # noqa: FBT001
    assert Config.parse(extra, {}).allowed_hosts.allows(host) is allowed


@given(address=st.ip_addresses(v=4), prefix=st.integers(0, 32))
def test_ipv4_counts_the_same_however_it_is_written(
    address: ipaddress.IPv4Address, prefix: int
) -> None:
    network = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
    mapped = f"::ffff:{network.network_address}/{prefix + 96}"
    for written in (str(network), mapped):
        hosts = Config.parse({"peers": [written]}, {}).allowed_hosts
        assert str(hosts) == str(network)
        assert hosts.allows(str(address))
        assert hosts.allows(f"::ffff:{address}")


def test_allowed_hosts_are_shown_as_an_operator_writes_them() -> None:
    assert str(Config().allowed_hosts) == "127.0.0.0/8, ::1/128, 127.0.0.1/32"
    assert str(AllowedHosts()) == "0.0.0.0/0, ::/0"


def test_the_ids_of_routers_need_a_list_of_peers() -> None:
    """No engine has signed the host beside such an id."""
    all_hosts = (["0.0.0.0/0", "::/0"], ["0.0.0.0/1", "128.0.0.0/1"], ["::ffff:0:0/96"], ["::/0"])
    for peers in ({}, *({"peers": each} for each in all_hosts)):
        with pytest.raises(ConfigError, match=r"^pair_ids is 'request_id', and peers allows every"):
            Config.parse({"pair_ids": "request_id", "key_file": "key", **peers}, {})
    assert Config.parse({"pair_ids": "request_id"}, {}).pair_ids == "request_id"
    extra = {"pair_ids": "kv_request_id", "key_file": "key", "peers": ["10.0.0.0/8"]}
    assert Config.parse(extra, {}).pair_ids == "kv_request_id"
