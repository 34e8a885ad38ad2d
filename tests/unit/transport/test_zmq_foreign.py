"""What is no peer of ours may listen where one was: it gets nothing, and breaks nothing."""

import subprocess
import sys

PROGRAM = """
import socket, threading
from nixl_kv.errors import TransportError
from nixl_kv.ids import endpoint_at
from nixl_kv.transport.zmq import ZmqControl

server = socket.create_server(("127.0.0.1", 0), backlog=1000)
endpoint = endpoint_at("127.0.0.1", server.getsockname()[1])

def greet():
    while True:
        connection, _ = server.accept()
        connection.sendall(b"\\x01\\x00\\x03\\x00ab")
        threading.Timer(0.05, connection.close).start()

threading.Thread(target=greet, daemon=True).start()
for number in range(400):
    control = ZmqControl()
    try:
        control.send(endpoint, b"question")
    except TransportError:
        pass  # it was refused at once
    control.poll(number % 20 / 5000)
    control.disconnect(endpoint)
    control.close()
print("alive")
"""
"""A service whose first bytes look like ZMQ's first protocol, which sent a name at once. ZMQ ends
the process if that name comes while its socket goes."""


def test_a_service_of_another_kind_does_not_end_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.stdout, ended.returncode) == ("alive\n", 0), ended.stderr
