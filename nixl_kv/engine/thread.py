"""The transfer thread's life: started once per life of a rank, and never ended by a fault.

The caller's thread talks to it through two queues only: commands in, results out. An error that
reaches its top is a bug of ours, and leaves the machines in doubt. So the thread logs it, fails all
that it holds, and starts again with new machines; the caller and the requests to come are not
touched.

The thread closes its loop itself, and ends only when nothing writes into the cache any longer: the
end of the thread is the proof. A thread that ends late closes its loop late.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from nixl_kv.engine.loop import Loop
from nixl_kv.errors import TransportError, get_logger, run_guarded

logger = get_logger(__name__)

STOP_TIMEOUT_S: Final = 30.0
"""How long `stop` waits. Posting a read of 2 million runs takes 8 s, destroying an agent 1 s."""
CLOSING_PAUSES_S: Final = (0.01, 1.0)
"""The first and the longest pause between two attempts to close; each is twice as long as the last.
An attempt may take a full garbage collection, which takes Python's lock from all other threads."""


class TransferThread:
    """Runs a `Loop` on a thread of its own."""

    def __init__(self, build_loop: Callable[[], Loop]) -> None:
        """Prepare; `start` starts it. `build_loop` runs on the new thread, and may raise."""
        self._build_loop = build_loop
        self._started: Future[Loop] = Future()
        self._is_stopping = False
        self._may_close = threading.Event()  # nobody wakes the loop any more
        self._unproven = "the thread has not ended its turn"
        self._thread = threading.Thread(target=self._main, name="nixl-kv-transfer", daemon=True)

    def start(self) -> Loop:
        """Start, and wait until the loop is built.

        Raises:
            NixlKVError: what `build_loop` raised.
        """
        self._thread.start()
        return self._started.result()

    @property
    def was_started(self) -> bool:
        """Whether there is, or was, a thread."""
        return self._thread.ident is not None

    def stop(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, which closes its loop before. May be called again.

        Args:
            timeout_s: for how long to wait; by default `STOP_TIMEOUT_S`.

        Raises:
            TransportError: if the thread has not ended by then. It goes on closing by itself.
        """
        if not self._thread.is_alive() or self._started.exception() is not None:
            return
        loop, timeout_s = self._started.result(), STOP_TIMEOUT_S if timeout_s is None else timeout_s
        if not self._is_stopping:
            self._is_stopping = True
            loop.wake()
            self._may_close.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            loop.parts.slots.clear_all()
            raise TransportError(
                f"the transfer thread has not stopped within {timeout_s:g} s: {self._unproven}"
            )

    def _main(self) -> None:
        """The thread's top."""
        _leave_pinned_core()
        try:
            loop = self._build_loop()
        except BaseException as error:  # noqa: BLE001 - raised again where the start is waited for
            self._started.set_exception(error)
            return
        self._started.set_result(loop)
        step: Callable[[], None] = loop.turn
        while not self._is_stopping:
            lived = run_guarded(step, "the transfer thread died; failing what it holds")
            step = loop.turn if lived else loop.restart
        self._may_close.wait()
        self._close(loop)

    def _close(self, loop: Loop) -> None:
        """Close the loop, as often as it takes."""
        pause_s, longest_s = CLOSING_PAUSES_S
        while True:
            try:
                loop.close()
            except TransportError as error:  # something is not proven to have ended yet
                self._unproven = str(error)
            except Exception as error:
                if str(error) != self._unproven:
                    logger.critical("closing the transfer thread failed; retrying", exc_info=True)
                self._unproven = str(error)
            else:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _leave_pinned_core() -> None:
    """Run on the cores of the parent process.

    The caller may have bound this process's main thread to one core, as vLLM does on CPU. Threads
    inherit that, and NIXL's threads from this one; there they would wait behind the model's
    computation. Only this thread is moved.
    """
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    except OSError as error:
        logger.debug("the transfer thread stays on its cores: %s", error)
