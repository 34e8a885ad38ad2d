"""The key file: its permissions, its content and the derived keys."""

import errno
import itertools
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from nixl_kv import keys
from nixl_kv.errors import ConfigError
from nixl_kv.keys import (
    ALLOWED,
    USER_KEY,
    Keys,
    find_user_key,
    make_user_key,
    other_user_keys,
    parse_key,
    read_key_file,
    user_key_paths,
    write_key_file,
)

ROOT = bytes(range(32))
EMPTIED, LASTING = keys._emptied_directories, keys._lasting_directories
"""Before the fixture of all tests hides those of this machine."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a key: the home directory; its neighbours are two that the system empties."""
    for name in ("home", "runtime", "tmp"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # for other processes
    monkeypatch.setattr(keys, "_emptied_directories", EMPTIED)
    monkeypatch.setattr(keys, "_lasting_directories", LASTING)
    # Not this machine's directories: a user may have logged in, and has a home.
    monkeypatch.setattr(keys, "RUN_USER", tmp_path / "run-user")
    entry = SimpleNamespace(pw_dir=str(tmp_path / "home"))
    monkeypatch.setattr(keys.pwd, "getpwuid", lambda _user: entry)
    return tmp_path / "home"


def written(path: Path, content: bytes = ROOT.hex().encode(), mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_keys_are_the_same_everywhere_for_ever() -> None:
    """Engines of different builds share a key file."""
    assert asdict(Keys.derive(ROOT)) == {
        "tickets": bytes.fromhex(
            "e5cb2058ef6b73b0d4fa4c26ac9710177325a9bae6442175bcb540c066e181f0"
        ),
        "server": bytes.fromhex("94571f6f820d742a6460615436712252091b22d13ba67a5118f4c3f4b7eeb4b3"),
        "client": bytes.fromhex("5bf3785d1f0aab943c5f0a8a11fac751589725ff8356e0dc8ba667c4e50e7b3c"),
        "tools": bytes.fromhex("7e2d70a0bd65843604934e3ef811bd88a794126d7a8bd8cf39ae9532bf34bb4f"),
        "fingerprint": "cfa33ee36bb42689",
    }


def test_only_the_fingerprint_is_shown() -> None:
    keys = Keys.derive(ROOT)
    assert repr(keys) == str(keys) == f"<Keys {keys.fingerprint}>"
    assert f"{keys!r}{[keys]}".count(keys.fingerprint) == 2


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_a_new_key_file_can_be_read_by_its_owner_alone(
    path: Path, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        keys = write_key_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert asdict(read_key_file(path)) == asdict(read_key_file(str(path))) == asdict(keys)
    assert write_key_file(tmp_path / "other").tickets != keys.tickets


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_nothing_is_overwritten(path: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("mine")
    with pytest.raises(ConfigError, match=r"^cannot write a key to '.*/key': File exists; allowed"):
        write_key_file(path)
    assert kind != "file" or path.read_text() == "mine"
    assert target.exists() == (kind == "link")


@pytest.mark.parametrize("name", ["no/such/folder/key", "with\0zero"])
def test_a_path_that_cannot_be_written_or_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot write a key to "):
        write_key_file(f"{tmp_path}/{name}")
    with pytest.raises(
        ConfigError, match=f": (No such file|.*embedded null).*; allowed: {ALLOWED}$"
    ):
        read_key_file(f"{tmp_path}/{name}")


def test_a_full_disk_leaves_no_half_key(
    path: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(_descriptor: int, _content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_key_file(path)
    assert not path.exists()
    with pytest.raises(ConfigError, match="No space left on device"):
        make_user_key()
    assert not [each for each in user.rglob("*") if not each.is_dir()]


@pytest.mark.parametrize(
    ("content", "mode"),
    [(ROOT.hex().encode() + b"\n", 0o600), (ROOT.hex().upper().encode(), 0o400)],
)
def test_a_file_of_64_hex_digits_that_its_owner_alone_can_read_is_a_key(
    path: Path, content: bytes, mode: int
) -> None:
    assert asdict(read_key_file(written(path, content, mode))) == asdict(Keys.derive(ROOT))


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        *[
            (content, 0o600, "its content is not 64 hexadecimal digits")
            for content in (
                b"",
                ROOT,
                ROOT.hex().encode() + b"00",
                ROOT.hex().encode() + b"\n\n",
                b"g" * 64,
                b"\xd9\xa3" * 32,  # digits of another script
            )
        ],
        *[
            (ROOT.hex().encode(), mode, f"its mode is {mode:04o}")
            for mode in (0o644, 0o604, 0o660, 0o404, 0o700, 0o4600, 0o1600)
        ],
    ],
)
def test_an_unfit_file_is_refused_and_not_shown(
    path: Path, content: bytes, mode: int, problem: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_key_file(written(path, content, mode))
    assert str(refusal.value) == f"key_file is {str(path)!r}: {problem}; allowed: {ALLOWED}"
    assert content == b"" or repr(content)[2:-1] not in str(refusal.value)


@pytest.mark.parametrize("group", ["effective", "supplementary"])
def test_a_file_that_a_group_of_this_process_can_read_is_accepted(
    path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Kubernetes mounts a Secret like this in a pod with fsGroup."""
    mine = written(path, mode=0o440).stat().st_gid
    egid, groups = (mine, []) if group == "effective" else (mine + 1, [mine + 2, mine])
    monkeypatch.setattr(os, "getegid", lambda: egid)
    monkeypatch.setattr(os, "getgroups", lambda: groups)
    read_key_file(path)
    monkeypatch.setattr(os, "getegid", lambda: mine + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [mine + 2])
    with pytest.raises(ConfigError, match=f"its mode is 0440, for the group {mine}; allowed"):
        read_key_file(path)


def test_a_key_may_be_given_as_text_and_is_not_shown(path: Path) -> None:
    fingerprint = read_key_file(written(path)).fingerprint
    for text in (ROOT.hex(), f" {ROOT.hex().upper()}\n"):
        assert parse_key(text, "IT").fingerprint == fingerprint
    for text in ("", "secret", ROOT.hex()[1:]):
        with pytest.raises(ConfigError, match=r"^IT is not a key; allowed: 64 hexadecimal digits$"):
            parse_key(text, "IT")


def test_a_file_of_another_user_than_this_or_root_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root refuses it too: the owner of a file may change it."""
    owner = os.geteuid()
    written(path)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        read_key_file(path)
        os.chown(path, 12345, -1)
        owner = 12345
    with pytest.raises(ConfigError, match=f"its owner is the user {owner}; allowed"):
        read_key_file(path)


def test_a_link_is_followed_and_its_target_checked(path: Path, tmp_path: Path) -> None:
    """Kubernetes mounts its secrets as links."""
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_key_file(written(link)).fingerprint == read_key_file(path).fingerprint
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="its mode is 0644"):
        read_key_file(link)


def test_a_key_must_be_in_a_regular_file(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=f": it is not a regular file; allowed: {ALLOWED}$"):
        read_key_file(path)


# The key that a user's engines share


def lasting(user: Path) -> Path:
    return user / ".local" / "state" / "nixl_kv" / USER_KEY


def emptied(user: Path, name: str) -> Path:
    """A file that earlier releases used, in a directory that the system empties."""
    directory = user.with_name("runtime")
    if name == "temporary":
        directory = Path(tempfile.gettempdir(), f"nixl_kv-{os.geteuid()}")
        directory.mkdir(mode=0o700, exist_ok=True)
    return directory / USER_KEY


def foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


def test_the_first_that_needs_a_key_makes_it_and_the_others_find_it(user: Path) -> None:
    assert find_user_key() is None
    assert not list(user.iterdir())
    made, path = make_user_key()
    assert path == lasting(user)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(each.stat().st_mode) for each in list(path.parents)[:3]] == [0o700] * 3
    assert [each.name for each in path.parent.iterdir()] == [USER_KEY]
    assert not any(any(user.with_name(name).iterdir()) for name in ("runtime", "tmp"))
    again, _ = make_user_key()
    found = find_user_key()
    assert found is not None
    assert asdict(made) == asdict(again) == asdict(found)
    assert other_user_keys(made) == []


START = """
import pwd, sys
from pathlib import Path
from nixl_kv import keys
pwd.getpwuid = {}.__getitem__
keys.RUN_USER = Path("/nowhere")
print("ready", flush=True)
sys.stdin.readline()
print(keys.make_user_key()[0].fingerprint, flush=True)
"""


@pytest.mark.parametrize("case", ["no key", "no home", "an old key", "two old keys"])
def test_processes_that_start_together_share_one_key(user: Path, case: str) -> None:
    if case == "no home":
        user.rmdir()
        user.with_name("runtime").rmdir()
    names = {"an old key": ["temporary"], "two old keys": ["runtime", "temporary"]}.get(case, [])
    old = [write_key_file(emptied(user, name)).fingerprint for name in names]
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        assert program.stdin is not None
        print("go", file=program.stdin, flush=True)
    shown = {program.communicate(timeout=60)[0].strip() for program in programs}
    assert len(shown) == 1, shown
    assert not old or shown == {old[0]}
    assert lasting(user).exists() == (case != "no home")


STATES = ("absent", "a file", "wide", "another user's", "its key")


@pytest.mark.parametrize("states", list(itertools.product(STATES, repeat=4)), ids=",".join)
def test_one_usable_directory_is_enough_and_later_engines_find_the_same_key(
    user: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...]
) -> None:
    """No other user can block a start or choose the key, whatever lies at each place."""
    monkeypatch.setenv("XDG_STATE_HOME", str(user.with_name("state")))
    directories = [
        user.with_name("state") / "nixl_kv",
        lasting(user).parent,
        user.with_name("runtime"),
        user.with_name("tmp") / f"nixl_kv-{os.geteuid()}",
    ]
    directories[2].rmdir()
    held = {}
    for directory, state in zip(directories, states, strict=True):
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if state == "a file":
            directory.touch(mode=0o600)
        elif state != "absent":
            directory.mkdir(mode=0o700)
            key = write_key_file(directory / USER_KEY)
            if state == "wide":
                directory.chmod(0o750)
            elif state == "another user's":
                foreign(directory / USER_KEY)
                foreign(directory)
            else:
                held[directory / USER_KEY] = key.fingerprint
    usable = [
        directory / USER_KEY
        for directory, state in zip(directories, states, strict=True)
        if state == "its key" or (state == "absent" and directory != directories[2])
    ]
    if not usable:
        with pytest.raises(ConfigError) as refusal:
            make_user_key()
        assert all(str(directory) in str(refusal.value) for directory in directories)
        return
    made, path = make_user_key()
    first = next(iter(held), usable[0])
    if first.parent in directories[2:] and usable[0].parent in directories[:2]:
        first = usable[0]  # where the key was copied
    assert path == first
    assert not held or made.fingerprint == next(iter(held.values()))
    again, where = make_user_key()
    found = find_user_key()
    assert found is not None
    assert (again.fingerprint, where, found.fingerprint) == (
        made.fingerprint,
        path,
        made.fingerprint,
    )
    others = [each for each, key in held.items() if key != made.fingerprint]
    assert other_user_keys(made) == others
    assert set(held) | {path} <= set(user_key_paths())


def test_roots_key_is_not_in_another_users_home(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo` may keep HOME: a directory of root there would block that user's engines."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    foreign(theirs)
    for name, value in {"HOME": theirs, "XDG_STATE_HOME": theirs / "state"}.items():
        monkeypatch.setenv(name, str(value))
    _, path = make_user_key()
    assert path == lasting(user)
    assert list(theirs.iterdir()) == []


@pytest.mark.parametrize("home", ["", "relative", "/nowhere"])
def test_without_a_home_the_users_entry_names_it(
    user: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_STATE_HOME", home and "relative")
    assert make_user_key()[1] == lasting(user)


def test_a_home_that_cannot_be_written_leaves_the_other_directories(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only root file system, a full quota, or a file system without hard links."""

    def refuse(self: Path, target: Path) -> None:
        if user in self.parents:
            raise OSError(errno.EPERM, "Operation not permitted")
        os.link(target, self)

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    made, path = make_user_key()
    assert path == emptied(user, "runtime")
    assert list(lasting(user).parent.iterdir()) == []
    assert asdict(make_user_key()[0]) == asdict(made)


@pytest.mark.parametrize("use", [make_user_key, find_user_key])
@pytest.mark.parametrize("place", ["lasting", "runtime", "temporary"])
def test_a_shared_key_that_is_unfit_is_refused_and_not_replaced(
    user: Path, place: str, use: Callable[[], object]
) -> None:
    path = lasting(user) if place == "lasting" else emptied(user, place)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written(path, b"")
    words = f"{path}: its content is not 64 hexadecimal digits; set XDG_STATE_HOME"
    with pytest.raises(ConfigError, match=words):
        use()
    assert path.read_bytes() == b""
