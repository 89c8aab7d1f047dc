"""The watchdog: it ends what hangs, with the stacks of all threads, and leaves alone what beats."""

import subprocess
import sys
import textwrap
import time

import pytest

from jfsdp import processes
from jfsdp import watchdog as watchdog_module
from jfsdp.watchdog import Watchdog


def run(script: str) -> tuple[int, str]:
    """Run a script in a process of its own; gives exit code and what it said."""
    body = f"from jfsdp.watchdog import Watchdog\n{textwrap.dedent(script)}"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_a_step_that_hangs_ends_with_all_stacks():
    code, said = run("""
        import threading

        def waits_for_nothing():
            threading.Event().wait()

        threading.Thread(target=waits_for_nothing, daemon=True).start()
        with Watchdog(0.5) as watchdog:
            watchdog.beat("step 7")
            threading.Lock().acquire() and threading.Event().wait()
    """)
    assert code == 1
    assert "error: nothing was done for 0.5 s, the last was step 7." in said and "--hang-timeout" in said
    assert "in waits_for_nothing" in said and "most recent call first" in said and said.count("hread 0x") >= 3


def test_a_hang_that_holds_the_interpreter_ends_too():
    code, said = run(r"""
        import re
        with Watchdog(0.5):
            re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, and no other thread runs
    """)
    assert code == 1 and "Timeout (0:00:01)" in said and "in <module>" in said


def test_what_beats_goes_on(monkeypatch):
    ended = []
    monkeypatch.setattr(processes, "leave", ended.append)
    monkeypatch.setattr(watchdog_module, "_SPEAK_S", 0)
    with Watchdog(0.5) as watchdog:
        for number in range(8):
            time.sleep(0.1)
            watchdog.beat(f"step {number}")
    with Watchdog(None) as watchdog:
        watchdog.beat("step 1")
    time.sleep(0.7)  # neither is still watching
    assert not ended


def test_time_counts_from_above_0():
    with pytest.raises(ValueError, match="given 0 seconds; use more than 0, or None for no watchdog"):
        Watchdog(0)
