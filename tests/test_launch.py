"""The launcher for one machine: who is who, whose output is whose, and how all end when one does."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jfsdp import launch
from jfsdp.options import parse
from jfsdp.processes import detect

ROOT = Path(launch.__file__).parent.parent


@pytest.fixture
def program(tmp_path):
    """Write a program whose body sees `rank` and `arguments`, and a folder for what it notes."""

    def write(body: str) -> str:
        head = "import os, signal, sys, time\nrank, arguments = int(os.environ['RANK']), sys.argv[1:]\n"
        (tmp_path / "program.py").write_text(head + textwrap.dedent(body))
        return str(tmp_path / "program.py")

    return write


@pytest.fixture
def hurried(monkeypatch):
    """Nobody waits long for the last words of processes."""
    monkeypatch.setattr(launch, "SPEAK_S", 0.5)
    monkeypatch.setattr(launch, "END_S", 0.5)


def test_each_process_is_told_who_it_is(program, tmp_path):
    path = program("""
        import json, pathlib
        pathlib.Path(arguments[0], f"{rank}.json").write_text(json.dumps([dict(os.environ), arguments]))
    """)
    assert launch.main(["--nproc", "3", path, str(tmp_path), "--nproc", "7"]) == 0
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    groups = [detect(environ=environ) for environ, _ in seen]
    assert [(g.index, g.count, g.local_index, g.local_count) for g in groups] == [(i, 3, i, 3) for i in range(3)]
    assert len({g.coordinator for g in groups}) == 1 and groups[0].coordinator.startswith("127.0.0.1:")
    assert all(arguments == [str(tmp_path), "--nproc", "7"] for _, arguments in seen)


def test_a_module_is_started_as_python_does():
    assert launch.main(["--nproc", "2", "-m", "json.tool", "--help"]) == 0


def test_lines_of_all_but_the_first_begin_with_their_number(program, capfd):
    path = program("print(f'from {rank}'); print(f'error of {rank}', file=sys.stderr); sys.stdout.write('no newline')")
    assert launch.main(["--nproc", "2", path]) == 0
    said = capfd.readouterr()
    assert "from 0\n" in said.out and "[1] from 1\n" in said.out and "[1] no newline" in said.out
    assert sorted(said.err.splitlines()) == ["[1] error of 1", "error of 0"]


@pytest.mark.parametrize(
    ("end", "words", "code"),
    [
        ("sys.exit(3)", "process 1 failed with exit code 3 after 0 s; ending process 0, 2", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "process 1 was ended by SIGKILL after 0 s; ending process 0, 2", 137),
    ],
    ids=["exit code", "signal"],
)
def test_one_that_fails_is_named_and_ends_the_others(program, hurried, capfd, end, words, code):
    """C-68, the launcher's part: also who does not listen to SIGTERM ends."""
    path = program(f"""
        if rank == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            time.sleep(0.5)
            {end}
        time.sleep(60)
    """)
    since = time.monotonic()
    assert launch.main(["--nproc", "3", path]) == code
    assert time.monotonic() - since < 10
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jfsdp.launch: ")]
    assert re.sub(r"after \d s", "after 0 s", said[0]) == f"jfsdp.launch: {words}"
    assert [line.removeprefix("jfsdp.launch: ") for line in said[1:]] == [
        "then process 0 was ended by SIGTERM",
        "then process 2 was ended by SIGKILL",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_is_passed_on_once_and_all_may_save(program, tmp_path, number):
    """C-45, the launcher's part: a terminal's Ctrl-C reaches each process once, and none is cut short."""
    path = program("""
        from pathlib import Path
        got = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: got.append(number))
        Path(arguments[0], f"ready{rank}").touch()
        while not got:
            time.sleep(0.05)
        time.sleep(0.5 * (1 + rank))
        has_own_group = os.getpgrp() == os.getpid()  # where a terminal's Ctrl-C does not reach it
        Path(arguments[0], f"saved{rank}").write_text(f"{len(got)} {has_own_group}")
        sys.exit(128 + got[0])
    """)
    command = [sys.executable, "-m", "jfsdp.launch", "--nproc", "2", path, str(tmp_path)]
    started = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.05)
    os.killpg(started.pid, number)  # as a terminal does
    said = started.communicate(timeout=30)[1]
    assert started.returncode == 128 + number and "jfsdp.launch" not in said
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1 True", "1 True"]


def test_all_may_save_when_the_terminal_goes(program, tmp_path):
    """Its end comes as SIGHUP, and what the launcher would say of those that fail has nowhere to go."""
    path = program("""
        from pathlib import Path
        def save(*_):
            time.sleep(0.5 * rank)
            Path(arguments[0], f"saved{rank}").touch()
            os._exit(1 + rank)
        signal.signal(signal.SIGTERM, save)
        Path(arguments[0], f"ready{rank}").touch()
        time.sleep(60)
    """)
    terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]
    command = [*terminal, sys.executable, "-m", "jfsdp.launch", "--nproc", "3", path, str(tmp_path)]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(3)))
    started.kill()
    started.wait()
    wait_for(lambda: all((tmp_path / f"saved{rank}").exists() for rank in range(3)), 10)


def test_the_end_of_one_that_got_a_signal_cuts_none_short(program, hurried, tmp_path, capfd):
    """A scheduler may signal one process only; they agree, and each ends when it has saved."""
    path = program("""
        from pathlib import Path
        if rank == 1:
            time.sleep(2)
            Path(arguments[0], "saved").touch()
        sys.exit(143)
    """)
    assert launch.main(["--nproc", "2", path, str(tmp_path)]) == 143
    assert (tmp_path / "saved").exists() and "jfsdp.launch" not in capfd.readouterr().err


def is_alive(pid: int) -> bool:
    """A zombie is not, whose parent in a container may never ask for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(what, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into Linux's /proc")


@linux
def test_processes_and_what_they_started_end_when_the_launcher_is_killed(program, tmp_path):
    """They get SIGTERM, as from the launcher, and may save; who has ended before is left alone."""
    path = program("""
        import subprocess
        from pathlib import Path
        def save(*_):
            Path(arguments[0], f"saved{rank}").touch()
            sys.exit(143)
        if rank == 2:
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        worker = subprocess.Popen(["sleep", "600"])
        Path(arguments[0], f"new{rank}").write_text(f"{os.getpid()} {worker.pid}")
        Path(arguments[0], f"new{rank}").rename(Path(arguments[0], f"pids{rank}"))
        time.sleep(600)
    """)
    command = [sys.executable, "-m", "jfsdp.launch", "--nproc", "3", path, str(tmp_path)]
    started = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: all((tmp_path / f"pids{rank}").exists() for rank in (0, 1)))
    pids = [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pids{rank}").read_text().split()]
    assert all(map(is_alive, pids))
    started.kill()
    wait_for(lambda: not any(map(is_alive, pids)), 10)
    assert started.communicate(timeout=10)[1] == "jfsdp.launch was killed; its processes have 60 s to end.\n"
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


@linux
@pytest.mark.slow
def test_a_run_saves_and_ends_with_its_data_workers_when_the_launcher_is_killed(tmp_path):
    options = f"--mesh 1x2 --steps 5000 --batch-size 4 --workers 2 --metrics {tmp_path}/m --checkpoint {tmp_path}/run"
    command = [sys.executable, "-m", "jfsdp.launch", "--nproc", "2", "train.py", *options.split()]
    environ = {**os.environ, "XLA_FLAGS": ""}
    started = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "m").exists() and len((tmp_path / "m").read_text().splitlines()) > 3, 120)

    def offspring(pid: int) -> list[int]:
        threads = Path(f"/proc/{pid}/task").iterdir()
        found = [child for thread in threads for child in (thread / "children").read_text().split()]
        return [int(child) for child in found] + [each for child in found for each in offspring(int(child))]

    pids = offspring(started.pid)
    started.kill()
    assert len(pids) >= 1 + 2 + 2 * 2  # the guard, two processes with two data workers each, and what helps them
    wait_for(lambda: not any(map(is_alive, pids)), 60)
    started.wait()
    (checkpoint,) = (tmp_path / "run").glob("step_*")
    assert (checkpoint / "jfsdp.json").exists()


@linux
def test_who_does_not_listen_is_killed_when_the_launcher_was():
    """And whose number was told twice has ended: it may be another process by now."""
    other = subprocess.Popen(["sleep", "60"], process_group=0)
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait; wait"], process_group=0)
    children = Path(f"/proc/{deaf.pid}/task/{deaf.pid}/children")
    wait_for(children.read_text)
    pids = [deaf.pid, int(children.read_text())]
    guard = [sys.executable, "-S", str(Path(launch.__file__).with_name("guard.py")), "0.5"]
    told = f"{other.pid}\n{deaf.pid}\n{other.pid}\n"
    assert subprocess.run(guard, input=told, text=True, timeout=20).returncode == 0
    wait_for(lambda: not any(map(is_alive, pids)), 5)
    assert is_alive(other.pid)
    for process in (deaf, other):
        process.kill()
        process.wait()


def test_a_third_ctrl_c_ends_who_does_not_listen(program):
    path = program("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for _ in range(3):
            time.sleep(0.2)
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    """)
    since = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script's shell has it for what it starts with &
    try:
        assert launch.main([path]) == 137
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - since < 10


def test_a_screen_that_is_gone_ends_nothing(program, tmp_path):
    """Behind `| head`, whose end only process 0 notices, if it still writes."""
    path = program("""
        for i in range(1000 * rank):
            print("line", i)
        open(arguments[0] + f"/ended{rank}", "w")
    """)
    words = [sys.executable, "-m", "jfsdp.launch", "--nproc", "2", path, str(tmp_path)]
    started = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.stdout.readline()
    started.stdout.close()
    assert started.communicate(timeout=30)[1] == "" and started.returncode == 0
    assert (tmp_path / "ended1").exists()


def test_under_nohup_the_end_of_a_terminal_ends_nothing(program):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        path = program("os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5)")
        assert launch.main([path]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "2"], "name the program to start"),
        (["--nproc", "0", "x.py"], "--nproc is 0; .* use 1 or more"),
        (["--nproc", "2", "nosuch.py"], "there is no nosuch.py in .*. Name a Python file, or -m and a module"),
    ],
)
def test_what_cannot_be_started_is_refused(capsys, words, message):
    with pytest.raises(SystemExit) as exit:
        launch.main(words)
    assert exit.value.code == 2 and re.search(message, capsys.readouterr().err)


SRUN = """
trap 'kill $!; exit $when_late' TERM
sleep $lasts &
echo "$@" > telling; mv telling told
wait
exit $at_end
"""


def test_the_examples_start_a_run(capsys, tmp_path):
    assert launch.main(["--example", "slurm"]) == 0
    (tmp_path / "train.sbatch").write_text(capsys.readouterr().out)
    for name, body in dict(srun=SRUN, scontrol='echo "$@" > asked').items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="64")
    cases = ((0, 9, 0, 0), (143, 9, 0, 143), (9, 0, 1, 0), (9, 1, 1, 1), (9, 143, 1, 143))
    for at_end, when_late, is_late, code in cases:
        (tmp_path / "told").unlink(missing_ok=True)
        environ = slurm | dict(at_end=str(at_end), when_late=str(when_late), lasts="20" if is_late else "0")
        started = subprocess.Popen(["bash", "train.sbatch"], cwd=tmp_path, env=environ)
        wait_for((tmp_path / "told").exists)
        if is_late:
            started.send_signal(signal.SIGUSR1)
        assert started.wait(20) == code
        # Only what was stopped for want of time, in good order, goes on.
        assert (tmp_path / "asked").exists() == (is_late and code == 143)
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    words = (tmp_path / "told").read_text().split()
    assert words[:4] == ["--cpus-per-task=64", "--kill-on-bad-exit=1", "python", "train.py"]
    assert parse(words[4:]).checkpoints.checkpoint_dir == Path("run")

    yaml = pytest.importorskip("yaml")
    assert launch.main(["--example", "jobset"]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    (workers,) = job["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environ = {entry["name"]: entry.get("value", "2") for entry in container["env"]}  # the third pod
    group = detect(environ=environ)
    # JobSet's names: <jobset>-<replicated job>-<replica>-<pod>.<jobset>
    first = f"{job['metadata']['name']}-{workers['name']}-0-0.{job['metadata']['name']}"
    assert (group.coordinator, group.count, group.index) == (f"{first}:1234", spec["completions"], 2)
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    assert parse(container["command"][2:]).checkpoints.checkpoint_dir == Path("/data/run")
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
