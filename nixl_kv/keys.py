"""The key that all engines share, and the keys that are derived from it.

Whoever has it may do all that an engine may: ask any engine for what it is and for its blocks, and
make tickets. So its file must be readable by its owner alone, or by groups that this process is in
as well, and nothing here shows, logs or compares what is in it; a fingerprint tells two keys apart.
"""

import contextlib
import hashlib
import os
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
"""For a file of a group that this process is in: as Kubernetes mounts a Secret with fsGroup."""

USER_KEY: Final = "nixl_kv.key"
"""The file in a user's runtime directory."""

RUN_USER: Final = Path("/run/user")
"""Has the runtime directories of users who have logged in."""

CONTENT: Final = "64 hexadecimal digits"
ALLOWED: Final = (
    f"a file made by `nixl-kv keygen`: one line of {CONTENT}, with mode 0600 or 0400, or 0640 or "
    "0440 and a group of this process; owned by this user or root"
)


@dataclass(frozen=True, repr=False, eq=False)
class Keys:
    """One key for each purpose, so that what is learnt of one use says nothing about the others."""

    tickets: bytes
    """For the MACs of tickets; 32 bytes, as are the next two."""

    server: bytes
    """The secret by which the listening side of a connection proves itself (Curve25519)."""

    client: bytes
    """The same for the side that connects."""

    fingerprint: str
    """16 hexadecimal digits that tell keys apart, and say nothing else about them."""

    @classmethod
    def derive(cls, root: bytes) -> "Keys":
        """All of them, from the bytes in a key file: a keyed hash, with a name for each purpose."""
        return cls(
            tickets=_derive(root, b"nixl_kv ticket"),
            server=_derive(root, b"nixl_kv server"),
            client=_derive(root, b"nixl_kv client"),
            fingerprint=_derive(root, b"nixl_kv shown")[:8].hex(),
        )

    def __repr__(self) -> str:
        return f"<Keys {self.fingerprint}>"


def read_key_file(path: str | Path) -> Keys:
    """Read a key file, if nobody else can.

    A link is followed, since secrets that are mounted are links; what counts is the file that was
    opened, whose mode and owner cannot change between the check and the reading.

    Raises:
        ConfigError: names the path, what is wrong with the file, and what is allowed.
    """
    try:
        return Keys.derive(_read(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"key_file is {str(path)!r}: {_words(error)}; allowed: {ALLOWED}"
        ) from error


def parse_key(text: str, name: str) -> Keys:
    """A key that is given as text.

    Raises:
        ConfigError: says what is allowed under that name; never what the text is.
    """
    try:
        return Keys.derive(_root(text.strip().encode()))
    except ValueError as error:
        raise ConfigError(f"{name} is no key; allowed: {CONTENT}") from error


def write_key_file(path: str | Path) -> Keys:
    """Make a key and write it to a new file that only this user can read.

    Raises:
        ConfigError: if there is something at the path already, or nothing can be written there.
    """
    root = secrets.token_bytes(KEY_BYTES)
    try:
        _write_new(path, root)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no key is written to {str(path)!r}: {_words(error)}; allowed: the path of a new file"
        ) from error
    return Keys.derive(root)


def make_user_key() -> tuple[Keys, Path]:
    """The key that all engines of this user on this machine share, and its file.

    The first process that needs it creates it. Processes that start at the same moment get the
    same key.

    Raises:
        ConfigError: if no directory is fit for it, or the file is not a key; names the path.
    """
    with contextlib.ExitStack() as stack:
        found, places, refusals = _search_user_key(stack, may_create=True)
        if found is not None:
            return found
        if not places:
            raise _no_user_key("; ".join(refusals))
        path, folder = places[0]
        try:
            _write_once(folder)
        except OSError as error:
            raise _no_user_key(f"{path}: {_words(error)}") from error
        return _read_user_key(path, folder), path


def find_user_key() -> Keys | None:
    """The key that `make_user_key` has made on this machine for this user; None if there is none.

    Raises:
        ConfigError: if the file is not a key; names the path.
    """
    with contextlib.ExitStack() as stack:
        found, _, _ = _search_user_key(stack, may_create=False)
    return None if found is None else found[0]


def _search_user_key(
    stack: contextlib.ExitStack, *, may_create: bool
) -> tuple[tuple[Keys, Path] | None, list[tuple[Path, int]], list[str]]:
    """The key and its file, if there is one; where one can be made, and why not elsewhere.

    A session may end while an engine runs on, and its runtime directory goes with it. So all
    directories are searched for a key before another one is made.
    """
    places: list[tuple[Path, int]] = []
    refusals: list[str] = []
    for directory, is_ours in _user_directories():
        try:
            if is_ours and may_create and not places:
                with contextlib.suppress(FileExistsError):
                    directory.mkdir(mode=0o700)
            folder = _open_private(directory)
        except (OSError, ValueError) as error:
            refusals.append(f"{directory}: {_words(error)}")
            continue
        stack.callback(os.close, folder)
        path = directory / USER_KEY
        try:
            return (_read_user_key(path, folder), path), [], []
        except FileNotFoundError:
            places.append((path, folder))
    return None, places, refusals


def _user_directories() -> Iterator[tuple[Path, bool]]:
    """Where a user's key may be, best first; and whether the directory is this package's own."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        yield Path(runtime), False
    yield RUN_USER / str(user), False
    yield Path(tempfile.gettempdir(), f"nixl_kv-{user}"), True


def _open_private(directory: Path) -> int:
    """A descriptor of a directory that only this user can use.

    A ValueError says why it is not to be trusted. All else is done relative to the descriptor, so
    that nobody can put another directory in its place.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise ValueError(f"its owner is the user {status.st_uid}")  # noqa: TRY301
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ValueError(f"its mode is {stat.S_IMODE(status.st_mode):04o}; allowed: 0700")  # noqa: TRY301
    except BaseException:
        os.close(folder)
        raise
    return folder


def _read_user_key(path: Path, folder: int) -> Keys:
    """FileNotFoundError if there is none."""
    try:
        return Keys.derive(_read(path.name, folder))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _no_user_key(f"{path}: {_words(error)}") from error


def _write_once(folder: int) -> None:
    """Write a new key into a directory, unless there is one; nobody sees half of it."""
    draft = f".{USER_KEY}.{secrets.token_hex(8)}"
    _write_new(draft, secrets.token_bytes(KEY_BYTES), folder)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, USER_KEY, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(draft, dir_fd=folder)


def _no_user_key(reason: str) -> ConfigError:
    return ConfigError(
        "neither key_file nor NIXL_KV_KEY is set, and the key that this user's engines on this "
        f"machine share cannot be used: {reason}; set XDG_RUNTIME_DIR to a directory of this user "
        "with mode 0700, or key_file or NIXL_KV_KEY to one key for all engines (nixl-kv keygen), "
        "or insecure to true where every process that reaches the port is trusted"
    )


def _derive(root: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(digest_size=KEY_BYTES, key=root, person=purpose).digest()


def _write_new(path: str | Path, root: bytes, folder: int | None = None) -> None:
    """Write a key to a new file, which `folder` is the directory of, with mode 0600."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        os.fchmod(descriptor, 0o600)  # whatever the umask has made of it
        os.write(descriptor, root.hex().encode() + b"\n")
    except OSError:
        os.unlink(path, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


def _read(path: str | Path, folder: int | None = None) -> bytes:
    """The bytes that the file says; a ValueError says why it is not to be trusted."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    try:
        _check(os.fstat(descriptor))
        text = os.read(descriptor, 2 * KEY_BYTES + 2)  # one more than a key and its line end
    finally:
        os.close(descriptor)
    return _root(text.removesuffix(b"\n"))


def _root(digits: bytes) -> bytes:
    """The bytes that hexadecimal digits stand for; the ValueError does not show them."""
    if len(digits) != 2 * KEY_BYTES or not set(digits) <= set(b"0123456789abcdefABCDEF"):
        raise ValueError("its content is something else")
    return bytes.fromhex(digits.decode("ascii"))


def _check(status: os.stat_result) -> None:
    """That nobody else knows the content of an opened file already."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if mode not in (*MODES, *GROUP_MODES):
        raise ValueError(f"its mode is {mode:04o}")
    if mode in GROUP_MODES and status.st_gid not in (os.getegid(), *os.getgroups()):
        raise ValueError(f"its mode is {mode:04o}, for the group {status.st_gid}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"its owner is the user {status.st_uid}")


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
