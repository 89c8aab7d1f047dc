"""Ends the processes of a launcher that was killed: `launch.py` starts it, and lives as long as its pipe to here.

A process of its own, since nobody can catch SIGKILL, and without imports of ours, since it does nothing for hours.
"""

import os
import signal
import sys
import time
from contextlib import suppress


def guard(seconds: float) -> None:
    """Read process groups, each once when it starts and again when it has ended, until the launcher is gone.

    Those that are left get SIGTERM, as from the launcher, so that they may save, and after `seconds` SIGKILL.
    """
    left: set[int] = set()
    for line in sys.stdin:
        left ^= {int(line)}
    for group in left:
        _send(os.kill, group, signal.SIGTERM)
    if left:
        with suppress(OSError):  # the terminal may be gone, too
            print(f"jfsdp.launch was killed; its processes have {seconds:g} s to end.", file=sys.stderr, flush=True)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        for group in [group for group in left if not _send(os.kill, group, 0)]:
            _send(os.killpg, group, signal.SIGKILL)  # what its first process has left
            left.remove(group)
    for group in left:
        _send(os.killpg, group, signal.SIGKILL)


def _send(kill, target: int, number: int) -> bool:
    """Whether there was somebody to send it to."""
    try:
        kill(target, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    guard(float(sys.argv[1]))
