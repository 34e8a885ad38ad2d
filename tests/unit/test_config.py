"""`kv_connector_extra_config`: accepted and refused keys and values."""

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any, Final, get_args

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
    OWN_NAME,
    PORT_VARIABLE,
    AllowedHosts,
    Config,
    Layout,
    foreign_lines,
    own_transfers,
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
NO_DIRECTORY = "the absolute path of a directory, of up to 89 bytes, or null"
NO_VERIFY = "'off', 'all', or 'sample:RATE' with RATE from 0 to 1"
NO_PEERS = r"a list of CIDRs, such as \['10.0.0.0/24', 'fd00::/64'\], or null"
NO_LABEL = "up to 256 printable characters, such as the trainer's step"
LAYOUTS = get_args(Layout)
NO_LAYOUT = " or ".join(map(repr, LAYOUTS))


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
        pytest.param("share_dir", "/" + "x" * 88, "/" + "x" * 88, id="longest directory"),
        pytest.param("peers", None, None, id="default peers"),
        pytest.param("offer_share", 1, 1.0, id="largest share"),
        *[
            pytest.param("overlap", value, word, id=f"overlap {value}")
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


def test_a_private_directory_is_used_or_made(tmp_path: Path) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.mkdir(0o700)
    for path in (there, new, new):
        Config.parse({"share_dir": str(path)}, {}).make_share_dir()
    assert new.stat().st_mode & 0o777 == 0o700
    Config.parse({"share_dir": None}, {}).make_share_dir()


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("{tmp}/no/parent", "cannot be used: No such file or directory"),
        ("{tmp}/file", "is not a directory"),
        ("{tmp}/open", "has mode 0750"),
        ("{tmp}/listed", "has mode 0701"),
    ],
)
def test_a_directory_that_others_may_use_is_refused(tmp_path: Path, path: str, wrong: str) -> None:
    (tmp_path / "file").touch()
    for name, mode in (("open", 0o750), ("listed", 0o701)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    path = path.format(tmp=tmp_path)
    with pytest.raises(ConfigError) as refused:
        Config(share_dir=path).make_share_dir()
    assert str(refused.value).startswith(f"share_dir {path!r} {wrong}; allowed: a directory that")


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {user}; this engine's is {user + 1}"):
        Config(share_dir=str(tmp_path)).make_share_dir()


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
    "request_timeout_s": (NO_SECONDS, SECONDS[:2]),
    "peer_timeout_s": (NO_SECONDS, SECONDS[:2]),
    "overlap": ("'on' or 'off'", ("", "On", "auto", "true", None, 0, 1, ["on"])),
    "layout": (NO_LAYOUT, ("", "lbhnc", "NHD", None, 5, ["auto"])),
    "weights": (NO_LABEL, (None, 7, "two\nlines", "x" * 257, ["a"])),
    "on_load_failure": ("'recompute' or 'fail'", ("", "Fail", True, None, ["fail"])),
    "key_file": (NO_KEY_FILE, ("", 5, True, ["key"], b"key", "a\0b")),
    "share_dir": (
        f"{NO_DIRECTORY}(; it has 90 bytes)?",
        ("", "share", "./share", 5, True, ["/a"], b"/a", "/a\0b", "/" + "x" * 89),
    ),
    "insecure": ("true or false", (None, 0, 1, "true", "", [])),
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
def test_a_value_that_is_not_allowed_is_refused_with_its_key_and_the_allowed_ones(
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


KNOWN = (
    "host, port, rank_port, backends, offer_ttl_s, lease_s, request_timeout_s, overlap, "
    "conversations, layout, key_file, insecure, peers, peer_timeout_s, path, share_dir, "
    "staging_mib, offer_share, weights, in_tree_decode, on_load_failure, media, verify"
)
UNKNOWN = "kv_connector_extra_config has the unknown key"

each_name = pytest.mark.parametrize("is_drop_in", [False, True], ids=["own name", "drop-in"])


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("prot", "port"),
        ("Port", "port"),
        ("ofer_ttl_s", "offer_ttl_s"),
        ("offer-ttl-s", "offer_ttl_s"),
        ("backend", "backends"),
        ("kv_lease_durations", "kv_lease_duration"),
        ("key", "key_file"),
        ("nixl_kv_key", "key_file"),
        ("offer_timeout", None),
        ("read_validation_timeouts", None),
        ("paced_reads", None),
    ],
)
@each_name
def test_an_unknown_key_is_refused_with_the_known_ones(
    key: str, close: str | None, *, is_drop_in: bool
) -> None:
    """`key` too: others would see it. A recipe for vLLM's own connector may have other keys."""
    if is_drop_in and close is None:
        Config.parse({key: "00"}, {}, is_drop_in=True)
        return
    with pytest.raises(ConfigError) as refusal:
        Config.parse({key: "00"}, {}, is_drop_in=is_drop_in)
    question = f"; did you mean {close!r}?" if close else ""
    assert str(refusal.value) == (
        f"{UNKNOWN} {key!r} (value '00'{question}); remove it, or use an allowed key: {KNOWN}"
    )
    assert ", ".join(Config.parsers()) == KNOWN


def test_all_unknown_keys_are_named_at_once() -> None:
    """One restart is enough."""
    extra = {"verfy": "all", "prot": 1, "x" * 200: ["y" * 200], "num_threads": 4}
    with pytest.raises(ConfigError) as refusal:
        Config.parse(extra, {})
    text = str(refusal.value)
    assert text.startswith(
        f"{UNKNOWN}s 'prot' (value 1; did you mean 'port'?), 'verfy' (value 'all'"
    )
    assert "x" * 97 + "...' (value ['" in text
    assert "num_threads" not in text
    assert len(text) < 1000


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
def test_an_address_that_other_machines_reach_needs_a_key(
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
def test_an_address_that_only_this_machine_reaches_needs_no_key(host: str) -> None:
    Config.parse({"host": host}, {})


def test_a_key_may_come_from_the_environment_and_is_not_shown() -> None:
    config = Config.parse({"host": "10.0.0.1"}, {KEY_VARIABLE: "00ff"})
    assert config.has_key
    assert config.allowed_hosts.allows("8.8.8.8")
    assert config.key == "00ff"
    assert "00ff" not in repr(config)
    assert Config.parse({}, {KEY_VARIABLE: ""}) == Config()


# Settings of vLLM's own connector, and of forks of it

PUBLISHED: Final[dict[str, dict[str, Any]]] = {
    "llm-d": {"backends": ["UCX"], "bidirectional_kv_xfer": True, "kv_lease_duration": 10},
    "Dynamo": {"backends": ["UCX"], "num_threads": 4},
    "InferenceX": {
        "backends": ["UCX"],
        "enforce_handshake_compat": False,
        "read_validation_timeout": 30.0,
        "enable_cross_layers_blocks": False,
    },
    "vLLM 0.32": {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": 480,
        "kv_recompute_threshold": 64,
        "push_registration_timeout": 30,
        "engine_ttl": 600,
        "enforce_handshake_compat": True,
        "backend_params": {"UCX": {"num_workers": "4"}},
    },
    "LMCache": {"lmcache_rpc_port": "producer1", "discard_partial_chunks": False},
    "Ascend": {"prefill": {"tp_size": 1}, "decode": {"tp_size": 1}, "use_ascend_direct": True},
    "MoRIIO": {"proxy_ip": "127.0.0.1", "proxy_ping_port": "36367", "http_port": 20005},
    "P2pNccl": {"send_type": "PUT_ASYNC", "nccl_num_channels": "16", "mem_pool_size_gb": 32},
    "shared storage": {"shared_storage_path": "/tmp/x"},  # noqa: S108 - not used
}
"""Keys of recipes that people paste, by their origin."""

THEIRS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("origin", PUBLISHED)
def test_a_published_recipe_starts_under_the_names_of_vllms_connectors(
    origin: str, name: str
) -> None:
    """Each key that does not count as one of ours gets its line."""
    extra = PUBLISHED[origin]
    transfer = {"kv_connector": name, "kv_connector_extra_config": extra}
    Config.of(transfer, {})
    lines = foreign_lines(transfer, {})
    others = set(extra) - {*Config.parsers(), LEASE_KEY}
    assert len(lines) == len(others)
    for key in others:
        (line,) = [line for line in lines if f"[{key!r}]" in line]
        assert ("set 'conversations' to 'on'" in line) == (key == "bidirectional_kv_xfer")
        assert "effect" in line or "lost" in line


def test_our_own_name_refuses_keys_that_no_release_of_vllms_connector_reads() -> None:
    for origin, extra in PUBLISHED.items():
        transfer = {"kv_connector": OWN_NAME, "kv_connector_extra_config": extra}
        if set(extra) <= {*Config.parsers(), *FOREIGN_KEYS, LEASE_KEY}:
            Config.of(transfer, {})
            continue
        with pytest.raises(ConfigError, match=UNKNOWN) as refusal:
            Config.of(transfer, {})
        assert all(repr(key) in str(refusal.value) for key in extra), origin


@pytest.mark.parametrize(
    ("value", "seconds", "is_changed"),
    [
        (45, 45.0, False),
        ("300", 300.0, False),
        (0, 0.1, True),
        (-1, 0.1, True),
        (7200, 3600.0, True),
        (10**400, None, True),
        (float("inf"), 3600.0, True),
        (None, None, True),
        (True, None, True),
        ("long", None, True),
        ([5], None, True),
        (float("nan"), None, True),
    ],
    ids=repr,
)
def test_a_lease_of_vllms_connector_counts_as_offer_ttl_s(
    value: object, seconds: float | None, *, is_changed: bool
) -> None:
    """Any number of seconds: no start ends because of a value that vLLM's connector takes."""
    transfer = {"kv_connector_extra_config": {LEASE_KEY: value}}
    if seconds is None:
        with pytest.raises(
            ConfigError, match=rf"config\['{LEASE_KEY}'\] is .*; allowed: {NO_SECONDS}"
        ):
            Config.of(transfer, {})
        return
    assert Config.of(transfer, {}).offer_ttl_s == seconds
    lines = foreign_lines(transfer, {})
    assert bool(lines) == is_changed
    assert not lines or f"is {value}, which counts as {seconds:g}" in lines[0]


def test_our_own_time_comes_before_a_lease() -> None:
    transfer = {"kv_connector_extra_config": {LEASE_KEY: "?", "offer_ttl_s": 5}}
    assert Config.of(transfer, {}).offer_ttl_s == 5.0
    assert foreign_lines(transfer, {}) == []


def test_settings_beside_the_extra_configuration_get_a_line_too() -> None:
    environ = {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"}
    lines = foreign_lines({"enable_permute_local_kv": True}, environ)
    assert [line.partition(" ")[0] for line in lines] == ["enable_permute_local_kv", *environ]
    assert (
        foreign_lines({"enable_permute_local_kv": False, "kv_connector_extra_config": None}, {})
        == []
    )
    transfer = {"kv_connector_extra_config": {"bidirectional_kv_xfer": False}}
    assert "lost" not in foreign_lines(transfer, {})[0]


# Which configurations are ours

OURS: Final = {"kv_connector": "NixlConnector", "kv_connector_module_path": "nixl_kv.connector"}


def multi(*children: object) -> dict[str, Any]:
    connectors = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": connectors}


@pytest.mark.parametrize(
    ("transfer", "count"),
    [
        (OURS, 1),
        ({"kv_connector": OWN_NAME}, 1),
        ({"kv_connector": "NixlConnector"}, 0),
        ({"kv_connector": OWN_NAME, "kv_connector_module_path": "theirs"}, 0),
        (multi(OURS, {"kv_connector": "OffloadingConnector"}), 1),
        (multi(multi(OURS), multi(multi({"kv_connector": "X"}, OURS), OURS)), 3),
        (multi(), 0),
        (multi(None, 5, []), 0),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": None}, 0),
        ({"kv_connector": "Other", "kv_connector_extra_config": {"connectors": [OURS]}}, 0),
    ],
)
def test_a_configuration_is_ours_at_any_depth(transfer: dict[str, Any], count: int) -> None:
    assert (
        own_transfers(transfer)
        == [{"kv_connector": OWN_NAME} if transfer == {"kv_connector": OWN_NAME} else OURS] * count
    )


def test_a_child_has_the_id_of_the_nearest_parent_that_has_one() -> None:
    own = {**OURS, "engine_id": "own"}
    inner = {**multi(OURS, own), "engine_id": "inner"}
    outer = {**multi(OURS, inner, multi(OURS)), "engine_id": "outer"}
    ids = [each["engine_id"] for each in own_transfers(outer)]
    assert ids == ["outer", "inner", "own", "outer"]


def test_a_deep_configuration_does_no_harm() -> None:
    transfer: dict[str, Any] = dict(OURS)
    for _ in range(10_000):
        transfer = multi(transfer)
    assert own_transfers(transfer) == [OURS]


@pytest.mark.parametrize(
    ("cidr", "words"),
    [("10.0.0.0/33", "does not appear to be"), ("10.0.0.1/8", "has host bits set")],
)
def test_an_entry_of_peers_other_than_a_cidr_is_named(cidr: str, words: str) -> None:
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
