"""The key that all engines share, and the keys derived from it.

A process with the key may do everything that an engine may: query engines, ask for blocks, make
tickets. Tools may have a key that is derived from it and only allows questions. So a key file must
be readable only by its owner, or by groups of this process. Nothing here logs, shows or compares a
key; a fingerprint tells two keys apart.
"""

import contextlib
import hashlib
import itertools
import os
import pwd
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_kv.errors import ConfigError

KEY_BYTES: Final = 32
MODES: Final = (0o600, 0o400)
GROUP_MODES: Final = (0o640, 0o440)
"""Allowed for a file of a group of this process: Kubernetes mounts a Secret with fsGroup so."""

USER_KEY: Final = "nixl_kv.key"
USER_DIRECTORY: Final = "nixl_kv"
RUN_USER: Final = Path("/run/user")  # has the runtime directories of users who have logged in

CONTENT: Final = "64 hexadecimal digits"
HEXADECIMAL: Final = frozenset(b"0123456789abcdefABCDEF")

# The key of tools: their secret, the engines' public key, and the fingerprint of the engines' key.
TOOLS_MARK: Final = "tools-"
TOOLS_DIGITS: Final = 4 * KEY_BYTES + 16
TOOLS_CONTENT: Final = f"{TOOLS_MARK!r} and {TOOLS_DIGITS} hexadecimal digits"
MAX_TEXT: Final = len(TOOLS_MARK) + TOOLS_DIGITS
ALLOWED: Final = (
    f"a file made by `nixl-kv keygen`: one line of {CONTENT}, with mode 0600 or 0400, or 0640 or "
    "0440 and a group of this process; owned by this user or root"
)


@dataclass(frozen=True, repr=False, eq=False)
class Keys:
    """One key per purpose, so that one of them reveals nothing about the others. 32 bytes each."""

    tickets: bytes  # for the MACs of tickets
    server: bytes  # the Curve25519 secret of the listening side of a connection
    client: bytes  # the Curve25519 secret of the connecting side
    tools: bytes  # that of a tool which connects, and may only ask
    fingerprint: str  # 16 hexadecimal digits that may be shown

    @classmethod
    def derive(cls, root: bytes) -> "Keys":
        return cls(
            tickets=_derive(root, b"nixl_kv ticket"),
            server=_derive(root, b"nixl_kv server"),
            client=_derive(root, b"nixl_kv client"),
            tools=_derive(root, b"nixl_kv tools"),
            fingerprint=_derive(root, b"nixl_kv shown")[:8].hex(),
        )

    def __repr__(self) -> str:
        return f"<Keys {self.fingerprint}>"


@dataclass(frozen=True, repr=False, eq=False)
class ToolsKeys:
    """For a host that only asks engines: its own secret, and the key by which it knows them.

    Nothing in it yields a secret of `Keys` but `tools`.
    """

    server: bytes  # the Curve25519 public key of engines
    client: bytes  # the secret `Keys.tools`
    fingerprint: str  # that of the engines' key

    def __repr__(self) -> str:
        return f"<ToolsKeys {self.fingerprint}>"


def read_key_file(path: str | Path) -> Keys:
    """Read a key file, or the target of a link (mounted secrets are links), or raise."""
    keys = read_any_key_file(path)
    if isinstance(keys, ToolsKeys):
        raise ConfigError(
            f"key_file is {str(path)!r}, which has the tools' key; allowed for an engine: {ALLOWED}"
        )
    return keys


def read_any_key_file(path: str | Path) -> Keys | ToolsKeys:
    """The same, or a file with the key of tools."""
    try:
        return _keys(_read(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"key_file is {str(path)!r}: {_reason(error)}; allowed: {ALLOWED}"
        ) from error


def parse_key(text: str, name: str) -> Keys:
    keys = parse_any_key(text, name)
    if isinstance(keys, ToolsKeys):
        raise ConfigError(f"{name} is the tools' key; allowed for an engine: {CONTENT}")
    return keys


def parse_any_key(text: str, name: str) -> Keys | ToolsKeys:
    try:
        return _keys(text.strip().encode())
    except ValueError as error:
        raise ConfigError(f"{name} is not a key; allowed: {CONTENT}") from error


def write_key_file(path: str | Path) -> Keys:
    """Make a key and write it to a new file that only this user can read."""
    root = secrets.token_bytes(KEY_BYTES)
    _write_key(path, root.hex())
    return Keys.derive(root)


def write_tools_key_file(path: str | Path, keys: Keys, server: bytes) -> None:
    """Write the key of tools that ask engines with these keys; `server` is their public key."""
    fields = keys.tools.hex(), server.hex(), keys.fingerprint
    _write_key(path, TOOLS_MARK + "".join(fields))


def _write_key(path: str | Path, text: str) -> None:
    try:
        _write_new(path, text)
    except (OSError, ValueError) as error:
        message = f"cannot write a key to {str(path)!r}: {_reason(error)}"
        folder = Path(path).absolute().parent
        if isinstance(error, FileNotFoundError) and not folder.is_dir():
            message = (
                f"cannot write a key to {str(path)!r}: its folder {str(folder)!r} does not exist; "
                "make it with `mkdir -p`"
            )
        raise ConfigError(f"{message}; allowed: the path of a new file") from error


# --- the key that the engines of one user on one machine share


def make_user_key() -> tuple[Keys, Path]:
    """Read the shared key and return it with its path; the first process makes it.

    Processes that start at the same moment get the same key. A key in a directory that the system
    empties is copied to one that lasts, so that engines which start later share it with those that
    run. A ConfigError says why the file is bad or why no directory is private.
    """
    found = _find_first()
    if found is not None and found[1].parent not in _emptied_directories():
        return found
    directories = _lasting_directories()
    if found is None:
        directories += _emptied_directories()
    refusals: list[str] = []
    for directory in directories:
        try:
            if directory.name.startswith(USER_DIRECTORY):  # a runtime directory is the system's
                _make_private(directory)
            _check_private(directory.lstat())
            root = secrets.token_bytes(KEY_BYTES) if found is None else _root(_read(found[1]))
            _write_once(directory / USER_KEY, root)
        except (OSError, ValueError) as error:
            refusals.append(f"{directory}: {_reason(error)}")
            continue
        made = _find_first()
        if made is not None:
            return made
    if found is None:
        raise _no_user_key("; ".join(refusals))
    return found  # no directory that lasts can be used


def find_user_key() -> Keys | None:
    """Read the shared key, if there is one; a ConfigError says why the file is bad."""
    found = _find_first()
    return found and found[0]


def other_user_keys(keys: Keys) -> list[Path]:
    """The files where other engines of this user may find another key than `keys`."""
    return [
        path
        for path, other in _search()
        if isinstance(other, Keys) and other.fingerprint != keys.fingerprint
    ]


def _find_first() -> tuple[Keys, Path] | None:
    for path, keys in _search():
        if isinstance(keys, Exception):
            raise _no_user_key(f"{path}: {_reason(keys)}") from keys
        return keys, path
    return None


def _search() -> Iterator[tuple[Path, Keys | Exception]]:
    """The files in this user's private directories, best first, with the key or the problem."""
    for path in user_key_paths():
        try:
            _check_private(path.parent.lstat())
        except (OSError, ValueError):
            continue
        try:
            yield path, Keys.derive(_root(_read(path)))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield path, error


def user_key_paths() -> list[Path]:
    """All files that may have the shared key, best first. Depends on user and environment."""
    return [each / USER_KEY for each in (*_lasting_directories(), *_emptied_directories())]


def _lasting_directories() -> list[Path]:
    """Directories for the state of this user's programs: the system deletes nothing there."""
    state, homes = os.environ.get("XDG_STATE_HOME", ""), [os.environ.get("HOME", "")]
    with contextlib.suppress(KeyError):  # the user of a container may have no entry
        homes.append(pwd.getpwuid(os.geteuid()).pw_dir)
    parents = [Path(state)] if state.startswith("/") else []
    for home in homes:
        with contextlib.suppress(OSError):
            if home.startswith("/") and Path(home).is_dir():
                parents.append(Path(home, ".local", "state"))
    return list(dict.fromkeys(each / USER_DIRECTORY for each in parents))


def _emptied_directories() -> list[Path]:
    """Directories that the system deletes at logout, or whose old files it deletes."""
    runtime, user = os.environ.get("XDG_RUNTIME_DIR", ""), os.geteuid()
    found = [Path(runtime)] if runtime.startswith("/") else []
    found += RUN_USER / str(user), Path(tempfile.gettempdir(), f"{USER_DIRECTORY}-{user}")
    return list(dict.fromkeys(found))


def _make_private(directory: Path) -> None:
    """Make a directory and its parents, with mode 0700, unless it is in another user's directory.

    With `sudo`, HOME may be another user's: a directory of root there would block that user.
    """
    above = (directory, *directory.parents)
    missing = list(itertools.takewhile(lambda each: not each.exists(), above))
    owner = above[len(missing)].stat().st_uid
    if owner not in (os.geteuid(), 0):
        raise ValueError(f"{above[len(missing)]} is of the user {owner}")
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)


def _check_private(status: os.stat_result) -> None:
    # If another user replaces the directory after this check, the owner and mode of the key file
    # still show whose key it is, and a new key is readable by this user only.
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError("Not a directory")
    if status.st_uid != os.geteuid():
        raise ValueError(f"its owner is the user {status.st_uid}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"its mode is {stat.S_IMODE(status.st_mode):04o}; allowed: 0700")


def _write_once(path: Path, root: bytes) -> None:
    # The link makes the whole key visible at once, and fails if another process was first.
    draft = path.with_name(f".{USER_KEY}.{secrets.token_hex(8)}")
    _write_new(draft, root.hex())
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()


def _no_user_key(reason: str) -> ConfigError:
    return ConfigError(
        "neither key_file nor NIXL_KV_KEY is set, and the key that this user's engines on this "
        f"machine share cannot be used: {reason}; set XDG_STATE_HOME to a directory of this user, "
        "or key_file or NIXL_KV_KEY to one key for all engines (nixl-kv keygen), "
        "or insecure to true where every process that reaches the port is trusted"
    )


# --- files


def _derive(root: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(digest_size=KEY_BYTES, key=root, person=purpose).digest()


def _write_new(path: str | Path, text: str) -> None:
    """Write a key to a new file with mode 0600."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # the umask may have removed bits
        os.write(descriptor, text.encode() + b"\n")
    except OSError:
        Path(path).unlink()
        raise
    finally:
        os.close(descriptor)


def _read(path: str | Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Check the opened file, not the path: its mode and owner cannot change before the read.
        _check(os.fstat(descriptor))
        text = os.read(descriptor, MAX_TEXT + 2)  # one more than a key and its line end
    finally:
        os.close(descriptor)
    return text.removesuffix(b"\n")


def _keys(text: bytes) -> Keys | ToolsKeys:
    mark = TOOLS_MARK.encode()
    if not text.startswith(mark):
        return Keys.derive(_root(text))
    digits = text[len(mark) :]
    if len(digits) != TOOLS_DIGITS or not set(digits) <= HEXADECIMAL:
        raise ValueError(f"its content is not {TOOLS_CONTENT}")
    fields = digits.decode("ascii")
    client, server = (bytes.fromhex(fields[n : n + 2 * KEY_BYTES]) for n in (0, 2 * KEY_BYTES))
    return ToolsKeys(server=server, client=client, fingerprint=fields[4 * KEY_BYTES :])


def _root(digits: bytes) -> bytes:
    if len(digits) != 2 * KEY_BYTES or not set(digits) <= HEXADECIMAL:
        raise ValueError(f"its content is not {CONTENT}")
    return bytes.fromhex(digits.decode("ascii"))


def _check(status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if mode not in (*MODES, *GROUP_MODES):
        raise ValueError(f"its mode is {mode:04o}")
    if mode in GROUP_MODES and status.st_gid not in (os.getegid(), *os.getgroups()):
        raise ValueError(f"its mode is {mode:04o}, for the group {status.st_gid}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"its owner is the user {status.st_uid}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
