"""The key that all engines share, and the keys that are derived from it.

Whoever has it may do all that an engine may: ask any engine for what it is and for its blocks, and
make tickets. So its file must be readable by its owner alone, or by groups that this process is in
as well, and nothing here shows, logs or compares what is in it; a fingerprint tells two keys apart.
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_kv.errors import ConfigError

KEY_BYTES: Final = 32
MODES: Final = (0o600, 0o400)
GROUP_MODES: Final = (0o640, 0o440)
"""For a file of a group that this process is in: as Kubernetes mounts a Secret with fsGroup."""

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
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        raise _unwritten(path, error) from error
    try:
        os.fchmod(descriptor, 0o600)  # whatever the umask has made of it
        os.write(descriptor, root.hex().encode() + b"\n")
    except OSError as error:
        Path(path).unlink(missing_ok=True)
        raise _unwritten(path, error) from error
    finally:
        os.close(descriptor)
    return Keys.derive(root)


def _derive(root: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(digest_size=KEY_BYTES, key=root, person=purpose).digest()


def _read(path: str | Path) -> bytes:
    """The bytes that the file says; a ValueError says why it is not to be trusted."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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


def _unwritten(path: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"no key is written to {str(path)!r}: {_words(error)}; allowed: the path of a new file"
    )


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
