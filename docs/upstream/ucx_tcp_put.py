"""A process without any key writes into another one over UCX's TCP port. See ucx-tcp-put.md."""

import multiprocessing
import socket
import struct
import time
from multiprocessing.connection import Connection

import numpy as np
import psutil
from nixl._api import nixl_agent, nixl_agent_config

TEXT = b"written by a stranger, no key!!!"
MAGIC, CONNECT, PUT, PUT_ACK = 0xCAFEBABE12345678, 32, 33, b"\x22"
# The connection's request, from 127.0.0.1 port 4444: magic number, message, length, then its body.
HELLO = struct.pack(
    "<QBIIB8sHH4s8x", MAGIC, CONNECT, 29, 1, 0, bytes(8), 2, 4444, bytes([127, 0, 0, 1])
)


def own(pipe: Connection) -> None:
    agent = nixl_agent("owner", nixl_agent_config(backends=["UCX"]))
    private = np.zeros(64, dtype=np.uint8)  # never registered
    listening = [
        one.laddr
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.ip == "127.0.0.1"
    ]
    pipe.send((private.ctypes.data, [one.port for one in listening]))
    until = time.monotonic() + 5.0
    while time.monotonic() < until and not pipe.poll(0.001):
        agent.get_new_notifs()
    pipe.send(bytes(private[: len(TEXT)]))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,))
    owner.start()
    address, ports = pipe.recv()
    answer = b""
    for port in ports:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(1.0)
            put = struct.pack("<BIQQI", PUT, 20, address, len(TEXT), 1) + TEXT
            stranger.sendall(HELLO + put)
            try:
                while PUT_ACK not in answer and (got := stranger.recv(4096)):
                    answer += got
            except TimeoutError:
                continue
    print(f"{len(ports)} ports, PUT acknowledged: {PUT_ACK in answer}")
    pipe.send(None)
    print("memory that was never registered:", pipe.recv())
    owner.join()


if __name__ == "__main__":
    main()
