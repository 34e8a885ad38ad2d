"""Network namespaces as hosts, joined by a wire that can be made slow, or by a switch. Needs root.

Each has `kv0`, its end of the wire or of the cable to the switch, and an interface by which this
host's own processes always reach it. A thread carries the wire's packets between two TUN devices,
because not every kernel has `tc netem`.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import Self

WIRE: Final = "kv0"
ADDRESSES: Final = "198.18.0.0/15"  # reserved for benchmarks (RFC 2544)
MTU: Final = 9000
LONGEST_QUEUE_S: Final = 0.5  # a packet that waits longer for a slow wire is dropped
AT_ONCE: Final = 16  # packets of one end, before it is the other's turn
BITS: Final = 8

TUN_DEVICE: Final = "/dev/net/tun"
TUNSETIFF: Final = 0x400454CA
TUNSETOFFLOAD: Final = 0x400454D0
IFF_TUN_NO_PI: Final = 0x1001  # whole IP packets, nothing before them
IFF_VNET_HDR: Final = 0x4000  # a header before each that leaves work to a network card
VNET_HEADER_BYTES: Final = 10
ALL_OFFLOADS: Final = 1 | 2 | 4 | 8  # checksums, and segments of TCP over IPv4 and IPv6, with ECN
LONGEST_PACKET: Final = (1 << 16) + VNET_HEADER_BYTES

CLONE_NEWNS: Final = 0x20000
CLONE_NEWNET: Final = 0x40000000
MNT_DETACH: Final = 2
MS_REC: Final = 1 << 14
MS_SLAVE: Final = 1 << 19


@dataclass(frozen=True)
class Quality:
    """How a wire carries packets, both ways. `rate` is in bits per second, None for no limit."""

    up: bool = True
    delay_s: float = 0.0
    loss: float = 0.0
    rate: float | None = None
    queue_s: float = LONGEST_QUEUE_S
    longest: int = LONGEST_PACKET
    """Longer packets vanish, as on a path with a smaller MTU than its ends think."""
    closed: range = range(0)
    """No packet of TCP from or to these ports passes, as through a firewall."""

    def passes(self, packet: bytes) -> bool:
        """Whether such a packet passes. `longest` and `closed` need a wire without offload."""
        if not self.up or len(packet) > self.longest:
            return False
        return not (self.closed and any(port in self.closed for port in _tcp_ports(packet)))


PERFECT: Final = Quality()


class Namespace:
    """One host. `number` makes its addresses."""

    def __init__(self, name: str, number: int) -> None:
        self.name = f"{name}-{os.getpid()}"
        self.number = number
        self.wire_address = f"198.18.0.{number}"
        """On `kv0`: of the wire, or of the switch that it was joined to last."""
        self.has_default_route = False
        self.address = f"198.18.{number}.2"
        self._outer = f"kvt{number}-{os.getpid()}"[:15]  # the kernel's limit
        self._gateway = f"198.18.{number}.1"

    def __enter__(self) -> Self:
        run_ip("netns", "add", self.name)
        self.ip("link", "set", "lo", "up")
        run_ip("link", "add", self._outer, "type", "veth", "peer", "eth0", "netns", self.name)
        run_ip("addr", "add", f"{self._gateway}/30", "dev", self._outer)
        run_ip("link", "set", self._outer, "up")
        self.ip("addr", "add", f"{self.address}/30", "dev", "eth0")
        self.ip("link", "set", "eth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it, and the interface here now: it would go with it, but some time later."""
        run_ip("link", "del", self._outer)
        run_ip("netns", "del", self.name)

    def ip(self, *arguments: str) -> None:
        run_ip("-n", self.name, *arguments)

    def set_up_link(self) -> None:
        """Give that interface its address, and turn it on."""
        # Duplicate address detection would take a second.
        ipv6 = [f"{self.wire_address}/64", "nodad"]
        address = ipv6 if ":" in self.wire_address else [f"{self.wire_address}/24"]
        self.ip("addr", "add", *address, "dev", WIRE)
        self.ip("link", "set", WIRE, "mtu", str(MTU), "up")

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs a command in it, as the same process."""
        return ["ip", "netns", "exec", self.name, *command]


class Wire:
    """Joins two namespaces. `quality` may be set at any time."""

    def __init__(self, left: Namespace, right: Namespace, *, offload: bool = False) -> None:
        """With `offload`, up to 64 KiB of a TCP stream pass as one packet, at several Gbit/s."""
        self.quality = PERFECT
        self._offload = offload
        self.carried = 0
        """Bytes of the packets that arrived, both ways."""
        self._ends = left, right
        self._devices: list[int] = []
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        for end in self._ends:
            self._devices.append(_open_tun(end, offload=self._offload))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        for device in self._devices:
            os.close(device)

    def _carry(self) -> None:
        left, right = self._devices
        directions = {left: _Direction(right), right: _Direction(left)}
        while not self._closing.is_set():
            due = min(direction.next_due for direction in directions.values())
            timeout_s = min(max(due - time.monotonic(), 0.0), 0.1)
            ready, _, _ = select.select([left, right], [], [], timeout_s)
            for device in ready:
                for packet in _read_packets(device):
                    directions[device].send(packet, self.quality)
            for direction in directions.values():
                self.carried += direction.deliver()


class Switch:
    """Joins any number of namespaces, and is their default route: they reach no other host.

    It has IPv4 or IPv6. Enter it after the namespaces; afterwards they may be joined to another
    one.
    """

    def __init__(self, *hosts: Namespace, ipv6: bool = False) -> None:
        self._bridge = f"kvb-{os.getpid()}"[:15]
        self._cables = {host: f"kvc{host.number}-{os.getpid()}"[:15] for host in hosts}
        self._prefix = "fd00::" if ipv6 else "198.18.0."
        self._family = "-6" if ipv6 else "-4"

    def __enter__(self) -> Self:
        run_ip("link", "add", self._bridge, "type", "bridge", "mcast_snooping", "0")
        run_ip("link", "set", self._bridge, "up")
        for host, cable in self._cables.items():
            host.wire_address = f"{self._prefix}{host.number}"
            run_ip("link", "add", cable, "type", "veth", "peer", WIRE, "netns", host.name)
            run_ip("link", "set", cable, "master", self._bridge, "mtu", str(MTU), "up")
            host.set_up_link()
            host.ip(self._family, "route", "add", "default", "dev", WIRE)
            host.has_default_route = True
        return self

    def __exit__(self, *_: object) -> None:
        for host, cable in self._cables.items():
            run_ip("link", "del", cable)
            host.has_default_route = False
        run_ip("link", "del", self._bridge)

    def cut(self, *hosts: Namespace) -> None:
        """No packet passes between these; between them and others it does."""
        self._isolate(hosts, "on")

    def heal(self) -> None:
        self._isolate(self._cables, "off")

    def _isolate(self, hosts: Iterable[Namespace], state: str) -> None:
        for host in hosts:
            run_ip("link", "set", self._cables[host], "type", "bridge_slave", "isolated", state)


class _Direction:
    """One direction of a wire."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._queue: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0  # when the last packet has left the sender
        self._random = random.Random(target)  # noqa: S311 - the choice of lost packets needs no secret

    @property
    def next_due(self) -> float:
        """When the next packet arrives."""
        return self._queue[0][0] if self._queue else float("inf")

    def send(self, packet: bytes, quality: Quality) -> None:
        """A packet was sent: it is lost, or arrives in its time."""
        if not quality.passes(packet) or self._random.random() < quality.loss:
            return
        now = time.monotonic()
        begin = max(now, self._free_at)
        if begin - now > quality.queue_s:
            return
        self._free_at = begin + (len(packet) * BITS / quality.rate if quality.rate else 0.0)
        self._queue.append((self._free_at + quality.delay_s, packet))

    def deliver(self) -> int:
        """Hand over all packets that are due; how many bytes."""
        now = time.monotonic()
        delivered = 0
        while self.next_due <= now:
            _, packet = self._queue.popleft()
            with contextlib.suppress(OSError):  # the interface is down
                delivered += os.write(self._target, packet)
        return delivered


def _tcp_ports(packet: bytes) -> tuple[int, ...]:
    """The ports of an IPv4 packet; () if it is not TCP."""
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return ()
    begin = (packet[0] & 15) * 4
    return struct.unpack_from("!HH", packet, begin)


def _read_packets(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(AT_ONCE):
            yield os.read(device, LONGEST_PACKET)


def _open_tun(end: Namespace, *, offload: bool) -> int:
    """One end of the wire; the device lives as long as its descriptor."""
    device = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    name = f"kvw{os.getpid()}"[:15]
    flags = IFF_TUN_NO_PI | (IFF_VNET_HDR if offload else 0)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    if offload:
        fcntl.ioctl(device, TUNSETOFFLOAD, ALL_OFFLOADS)
    run_ip("link", "set", name, "netns", end.name, "name", WIRE)
    end.set_up_link()
    return device


def enter(name: str) -> None:
    """Move this process, which has one thread, into a namespace, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), f"{function} for namespace {name}")

    with Path("/run/netns", name).open(encoding="utf-8") as namespace:
        call("setns", namespace.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)  # /sys shows the interfaces of the namespace that mounted it
    call("mount", b"", b"/", b"none", MS_REC | MS_SLAVE, None)
    call("umount2", b"/sys", MNT_DETACH)
    call("mount", name.encode(), b"/sys", b"sysfs", 0, None)


def run_ip(*arguments: str) -> None:
    """Run `ip`; raises, in its words, if it fails."""
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
