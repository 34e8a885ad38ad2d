"""Does a filter pass a packet, and does a port answer a connection?"""

import ipaddress
import socket
import struct

from nixl_kv.transport.ports import (
    ALL_ONES,
    AND,
    ETHERNET_TYPE,
    IPV4,
    IPV6,
    JUMP,
    JUMP_IF_EQUAL,
    LOAD_MEMORY,
    LOAD_PACKET,
    NETWORK_HEADER,
    RETURN,
    STORE,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def passes(code: bytes, source: Address) -> bool:
    """Run a filter on a packet from there, as Linux's documentation says."""
    offset, kind = (12, IPV4) if source.version == 4 else (8, IPV6)
    packet = bytes(offset) + source.packed
    accumulator, memory, at = 0, [0] * 16, 0
    instructions = list(struct.iter_unpack("HBBI", code))
    while True:
        opcode, if_true, if_false, constant = instructions[at]
        at += 1
        if opcode == LOAD_PACKET:
            begin = constant - NETWORK_HEADER
            accumulator = (
                kind
                if constant == ETHERNET_TYPE
                else int.from_bytes(packet[begin : begin + 4], "big")
            )
        elif opcode == LOAD_MEMORY:
            accumulator = memory[constant]
        elif opcode == STORE:
            memory[constant] = accumulator
        elif opcode == AND:
            accumulator &= constant
        elif opcode == JUMP:
            at += constant
        elif opcode == JUMP_IF_EQUAL:
            at += if_true if accumulator == constant else if_false
        else:
            assert opcode == RETURN
            assert constant in (0, ALL_ONES)
            return constant == ALL_ONES


def connects(source: str, port: int, host: str = "127.0.0.1") -> socket.socket | None:
    """A connection, or None if nothing answers."""
    try:
        return socket.create_connection((host, port), timeout=0.1, source_address=(source, 0))
    except TimeoutError:
        return None
