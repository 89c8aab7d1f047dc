"""Start several processes of a program on this machine: `python -m jfsdp.launch --nproc 2 train.py --mesh 2x4`.

Each process gets torchrun's variables, from which `processes.py` reads who it is; torchrun itself, srun, mpirun and
Kubernetes do the same over many machines. Process 0 has the terminal, lines of the others begin with their number.
Signals are passed on, SIGHUP as SIGTERM and a third Ctrl-C as SIGKILL. When a process fails, it is named, and the
others are ended. When the launcher itself is killed, they get SIGTERM from `guard.py`.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SPEAK_S = 5
"""Seconds that the others have, after one failed, to say what they saw."""
END_S = 15
"""Seconds that they have to follow SIGTERM before SIGKILL."""
SAVE_S = 600
"""Seconds that all have to end after a signal that was passed on: they may be saving."""
FOLLOW_S = 60
"""Seconds that the others have when one has ended in good order after a signal, and all when the launcher is killed."""

SLURM = """\
#!/bin/bash
# sbatch train.sbatch; ids.bin and run/ lie where all nodes see them
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1        # one process with all GPUs of its node; 8 with 8 CPUs each work, too
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300        # five minutes before the time is up, to save; more for large models
#SBATCH --requeue                  # also when a node fails or is taken away
#SBATCH --open-mode=append
trap 'is_late=1; kill -TERM "$run"' USR1
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
    python train.py --mesh 4x8 --data ids.bin --checkpoint run/ &
run=$!
wait "$run"
code=$?
if [ -n "$is_late" ]; then         # then that was not the end of it, but the signal
    wait "$run"
    code=$?
    if [ "$code" -eq 143 ]; then   # stopped and saved: it goes on when it is its turn again
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
"""

JOBSET = """\
# kubectl apply -f train.yaml; fill in IMAGE and CLAIM
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: train
spec:
  failurePolicy:
    maxRestarts: 3                 # all pods together; they go on from the newest checkpoint
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          parallelism: 4
          completions: 4
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 300     # to save; more for large models
              containers:
                - name: train
                  image: IMAGE
                  command: [python, train.py, --mesh, 4x8, --data, /data/ids.bin, --checkpoint, /data/run]
                  env:
                    - name: WORLD_SIZE
                      value: "4"
                    - name: RANK
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
                    - name: MASTER_ADDR
                      value: train-workers-0-0.train         # JobSet makes the headless service
                    - name: MASTER_PORT
                      value: "1234"
                  resources:
                    limits:
                      nvidia.com/gpu: 8
                  volumeMounts:
                    - name: data
                      mountPath: /data
                    - name: shm
                      mountPath: /dev/shm
              volumes:
                - name: data
                  persistentVolumeClaim:
                    claimName: CLAIM               # ReadWriteMany: every pod writes its part of a checkpoint
                - name: shm
                  emptyDir:
                    medium: Memory                 # NCCL shares more than a container's 64 MiB
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the processes and give the exit code of the first that failed, 128 + n for one ended by signal n."""
    parser = argparse.ArgumentParser(
        prog="python -m jfsdp.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --nproc N [-m] PROGRAM ...\n       %(prog)s --example slurm|jobset",
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes to start")
    parser.add_argument("--example", choices=("slurm", "jobset"), help="print a file to begin with, and start nothing")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as in python -m")
    parser.add_argument("program", nargs="?", help="a Python file or module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    asked = parser.parse_args(argv)
    if asked.example:
        print({"slurm": SLURM, "jobset": JOBSET}[asked.example], end="")
        return 0
    if asked.program is None:
        parser.error("name the program to start, such as train.py.")
    if asked.nproc < 1:
        parser.error(f"--nproc is {asked.nproc}; it counts processes, so use 1 or more.")
    if not asked.is_module and not Path(asked.program).exists():
        parser.error(f"there is no {asked.program} in {Path.cwd()}. Name a Python file, or -m and a module.")
    command = [sys.executable, *(["-m"] if asked.is_module else []), asked.program, *asked.arguments]
    return Launch(command, asked.nproc).run()


class Ended(NamedTuple):
    """A process is gone: its number, and its exit code or, below 0, the signal that ended it."""

    rank: int
    code: int


class Launch:
    """The processes of one command on this machine."""

    def __init__(self, command: list[str], count: int):
        self._started, self._port = time.monotonic(), _free_port()
        self._events: queue.SimpleQueue[Ended | signal.Signals] = queue.SimpleQueue()  # reentrant: handlers put here
        self._copiers: list[threading.Thread] = []
        self._deadlines: list[tuple[float, int]] = []
        self._is_stopping, self._interrupts, self._first_failure = False, 0, 0
        self._command, self._count = command, count
        self._running: dict[int, subprocess.Popen] = {}

    def run(self) -> int:
        """Start all and wait for them, pass signals on, and end all when one fails."""
        passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which means all of them
            passed_on.remove(signal.SIGHUP)
        before = {n: signal.signal(n, lambda n, _: self._events.put(signal.Signals(n))) for n in passed_on}
        # A session of its own: what ends the launcher and its terminal shall not end it.
        command = [sys.executable, "-S", str(Path(__file__).with_name("guard.py")), str(FOLLOW_S)]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        try:
            for rank in range(self._count):
                self._running[rank] = self._start(rank)
            while self._running:
                self._turn()
        finally:
            self._signal(signal.SIGKILL)
            self._guard.kill()
            self._guard.communicate()
            for number, handler in before.items():
                signal.signal(number, handler)
        for thread in self._copiers:
            thread.join(1)
        return self._first_failure

    def _turn(self) -> None:
        """One event: a process has ended, a signal has come, or time is up."""
        left = max(self._deadlines[0][0] - time.monotonic(), 0) if self._deadlines else None
        try:
            event = self._events.get(timeout=left)
        except queue.Empty:
            self._signal(self._deadlines.pop(0)[1])
            return
        if isinstance(event, Ended):
            self._tell_guard(self._running.pop(event.rank))
            if event.code:
                self._after_failure(event)
        else:
            self._interrupts += event == signal.SIGINT
            # SIGHUP is the end of a terminal, and a reason to save: programs listen to SIGTERM.
            number = signal.SIGTERM if event == signal.SIGHUP else event
            self._signal(number if self._interrupts < 3 else signal.SIGKILL)
            if not self._is_stopping:
                self._is_stopping = True
                self._end_by((SAVE_S, signal.SIGKILL))

    def _after_failure(self, event: Ended) -> None:
        words = f"failed with exit code {event.code}"
        if event.code < 0:
            words = f"was ended by {signal.Signals(-event.code).name}"
        code = event.code if event.code > 0 else 128 - event.code
        if self._first_failure:
            if not (self._is_stopping and code == self._first_failure):  # else it only followed the signal
                _say(f"then process {event.rank} {words}")
            return
        self._first_failure = code
        if event.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):  # some process got a signal, and all agreed
            self._is_stopping = True
        if self._is_stopping:
            self._end_by((FOLLOW_S, signal.SIGKILL))
            return
        others = f"; ending process {', '.join(map(str, self._running))}" if self._running else ""
        _say(f"process {event.rank} {words} after {time.monotonic() - self._started:.0f} s{others}")
        self._end_by((SPEAK_S, signal.SIGTERM), (SPEAK_S + END_S, signal.SIGKILL))

    def _end_by(self, *deadlines: tuple[float, int]) -> None:
        now = time.monotonic()
        self._deadlines = [(now + seconds, number) for seconds, number in deadlines]

    def _signal(self, number: int) -> None:
        for process in self._running.values():
            process.send_signal(number)

    def _start(self, rank: int) -> subprocess.Popen:
        who = dict(RANK=rank, WORLD_SIZE=self._count, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=self._count)
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=self._port, PYTHONUNBUFFERED=1)
        environment = {**os.environ, **{name: str(value) for name, value in {**who, **where}.items()}}
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        pipes = {} if rank == 0 else dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        # A group of its own: Ctrl-C reaches only the launcher, which passes it on once.
        process = subprocess.Popen(self._command, env=environment, stdin=subprocess.DEVNULL, process_group=0, **pipes)
        for pipe, screen in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                self._copiers.append(_thread(lambda pipe=pipe, screen=screen: _copy(rank, pipe, screen)))
        self._tell_guard(process)
        _thread(lambda: self._events.put(Ended(rank, process.wait())))
        return process

    def _tell_guard(self, process: subprocess.Popen) -> None:
        """Once when a process has started, once when it has ended."""
        with suppress(OSError):
            self._guard.stdin.write(f"{process.pid}\n")
            self._guard.stdin.flush()


def _thread(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def _copy(rank: int, pipe, screen) -> None:
    """Lines of a process to the screen, each under its number, in one write each so that they stay whole."""
    with pipe:
        for line in pipe:
            with suppress(OSError):  # nobody reads on, as behind `| head`: no reason to stop, nor to write it later
                os.write(screen, b"[%d] %s" % (rank, line))


def _say(words: str) -> None:
    with suppress(OSError):  # the terminal is gone
        print(f"jfsdp.launch: {words}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
