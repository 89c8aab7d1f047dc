"""A watchdog for steps that hang: it prints the stacks of all threads and ends the process.

A collective whose partner is gone, a file system that does not answer, a lock: nothing raises, and a cluster idles.
Owns the clock and the ending; who beats, and how often, is the business of the training loop.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from types import TracebackType

from jfsdp import processes

_SPEAK_S = 5


class Watchdog:
    """Ends the process with exit code 1 when `beat` has not been called for `seconds`; None never does.

    `with Watchdog(1800) as watchdog:` and `watchdog.beat("step 7")` whenever something is done.
    """

    def __init__(self, seconds: float | None):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"the watchdog was given {seconds} seconds; use more than 0, or None for no watchdog.")
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._last = ("start", time.monotonic())

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self.beat("start")
            self._thread.start()
        return self

    def beat(self, what: str) -> None:
        """Something is done, in words."""
        self._last = (what, time.monotonic())
        if self._seconds is not None:
            # Where a hang holds the interpreter's lock our thread cannot speak; faulthandler's own one still can.
            faulthandler.dump_traceback_later(2 * self._seconds, exit=True, file=sys.__stderr__)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        wait = self._seconds
        while not self._stopped.wait(wait):
            what, since = self._last
            wait = since + self._seconds - time.monotonic()
            if wait <= 0:
                self._end(what)

    def _end(self, what: str) -> None:
        print(
            f"{processes.label()}error: nothing was done for {self._seconds:g} s, the last was {what}. The stacks of "
            "all threads follow; a process that waits in a collective waits for another one. If this is only slow, "
            "give more time with --hang-timeout.",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        time.sleep(_SPEAK_S)  # who leaves takes the others along, and their time is up at nearly the same moment
        processes.leave(1)
