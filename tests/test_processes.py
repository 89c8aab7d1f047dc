"""Many processes: who tells what, 2 x 4 and 4 x 2 devices against 1 x 8, and how a run of many ends."""

import json
import logging
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import train
from jfsdp import cli, processes
from jfsdp.checkpoint import open_checkpoint
from jfsdp.options import DeviceConfig
from jfsdp.processes import Group, detect, local_devices
from jfsdp.run_folder import Checkpoints
from tests import process_scenarios
from tests.support import SETTINGS, settings

ROOT = Path(__file__).parent.parent
TORCHRUN = dict(
    RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="node1", MASTER_PORT="29500"
)
SLURM = dict(
    SLURM_JOB_ID="4097",
    SLURM_STEP_NODELIST="node[004-007],other1",
    SLURM_NTASKS="99",
    SLURM_STEP_NUM_TASKS="19",
    SLURM_PROCID="17",
    SLURM_LOCALID="1",
    SLURM_NODEID="4",
    SLURM_STEP_TASKS_PER_NODE="4(x4),3",
)
OPEN_MPI = dict(
    OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2"
)


# ------------------------------------------------------------ who tells


@pytest.mark.parametrize(
    ("environ", "source", "group"),
    [
        (TORCHRUN, "torchrun", ("node1:29500", 8, 5, 1, 4)),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun", ("node1:29501", 8, 5, 1, 4)),
        (SLURM, "Slurm", ("node004:61441", 19, 17, 1, 3)),
        ({**SLURM, "SLURM_STEP_NODELIST": "a,b", "SLURM_NODEID": "0"}, "Slurm", ("a:61441", 19, 17, 1, 4)),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
            "Open MPI",
            ("10.96.0.1:62624", 4, 3, 1, 2),
        ),
        ({**SLURM, **OPEN_MPI, **TORCHRUN}, "torchrun", ("node1:29500", 8, 5, 1, 4)),
    ],
    ids=["torchrun", "torchrun that listens itself", "slurm", "slurm, names", "open mpi 4", "all three"],
)
def test_a_launcher_tells_who_this_is(environ, source, group, monkeypatch):
    for name, value in environ.items():  # JAX's reader of host lists looks there
        monkeypatch.setenv(name, value)
    found = detect(environ=environ)
    assert source in found.source
    assert (found.coordinator, found.count, found.index, found.local_index, found.local_count) == group


def test_open_mpi_5_on_one_host_meets_at_home_and_else_asks_for_the_coordinator():
    one_host = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-host-77@1"}
    address = detect(environ=one_host).coordinator
    assert re.fullmatch(r"127\.0\.0\.1:6\d{4}", address) and detect(environ=one_host).coordinator == address
    with pytest.raises(ValueError, match="Open MPI tells of 4 processes, but not where process 0 .* --coordinator"):
        detect(environ=OPEN_MPI)
    assert detect(environ=OPEN_MPI, coordinator="h:1").coordinator == "h:1"


def test_words_win_over_the_environment():
    given = dict(coordinator="h:1", num_processes=2, process_id=1)
    group = detect(environ=TORCHRUN, **given)
    assert (group.coordinator, group.count, group.index, group.local_count) == ("h:1", 2, 1, 1)
    assert detect(environ=TORCHRUN, num_processes=1).count == 1
    assert detect(environ=TORCHRUN, coordinator="h:1") == Group(
        source="torchrun's variables", coordinator="h:1", count=8, index=5, local_index=1, local_count=4
    )


def test_without_a_launcher_it_is_alone():
    assert detect(environ={}).count == 1
    assert detect(environ={"RANK": "0", "WORLD_SIZE": "1"}).count == 1
    assert processes.label() == ""
    assert processes.gather({"a": 1.5}) == {"a": [1.5]}
    assert processes.connect(detect(environ={})).count == 1 and not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("environ", "given", "message"),
    [
        ({}, dict(coordinator="h:1"), "--coordinator given, but not --num-processes and --process-id, and no launcher"),
        ({}, dict(coordinator="h:1", num_processes=2, process_id=2), "process 2 of 2 .*Use .* --process-id 0 to 1"),
        ({}, dict(coordinator="h:1", num_processes=0, process_id=0), "there is at least one"),
        (
            {},
            dict(coordinator="h", num_processes=2, process_id=0),
            "coordinator 'h' is no HOST:PORT. Write .* node1:1234",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "not where process 0 can be reached. .*MASTER_ADDR and MASTER_PORT"),
        ({**TORCHRUN, "RANK": "one"}, {}, "RANK is 'one'; it should be a number, .* or give --coordinator"),
        ({**TORCHRUN, "MASTER_PORT": ""}, {}, "MASTER_PORT is ''; it should be a number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, {}, "'node1:99999' is no HOST:PORT. .* ports end at 65535"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, {}, "this is process 1 of 1 on this host, .* Set LOCAL_RANK"),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "no uri"}, {}, "Open MPI tells .* not where process 0 can be reached"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, "OMPI_COMM_WORLD_LOCAL_SIZE is missing in the environment"),
        ({k: v for k, v in SLURM.items() if "NUM" not in k and "NTASKS" not in k}, {}, "SLURM_NTASKS is missing"),
    ],
    ids=[
        "partly", "index", "count", "address", "no address", "no number", "empty", "port", "local", "uri", "open mpi",
        "slurm",
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named(environ, given, message, monkeypatch):
    for name, value in environ.items():  # JAX's readers look there
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        detect(environ=environ, **given)


def test_a_job_that_started_no_tasks_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        assert detect(environ={"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}).count == 1
        assert detect(environ={"WORLD_SIZE": "3"}).count == 1
        assert detect(environ={"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"}).count == 1
    assert "WORLD_SIZE is 3 and RANK is not set: torchrun's variables are not used. Set both" in caplog.text
    assert "4 tasks, but srun started none: training alone. Use srun." in caplog.text
    assert "pip install kubernetes, or set RANK" in caplog.text


def test_a_terminal_that_is_gone_keeps_no_process(monkeypatch):
    """Else it would end like one that did not fail, by JAX's farewell, which waits for the others."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(processes, "_here", Group(source="a test", count=2, coordinator="h:1"))

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as changed, pytest.raises(RuntimeError, match="itself"):
        for stream in ("stdout", "stderr"):
            changed.setattr(sys, stream, SimpleNamespace(write=fail, flush=fail))
        with processes.together():
            raise RuntimeError("itself")
    assert ended == [1]


def test_a_pod_that_may_not_ask_for_its_job_is_told_what_to_allow(monkeypatch):
    cluster = type("K8sCluster", (), {"is_env_present": lambda: True})
    cluster.get_process_count = lambda: (_ for _ in ()).throw(RuntimeError("Kubernetes API Error: 403 - Forbidden"))
    monkeypatch.setattr(processes, "find_spec", lambda name: True)
    monkeypatch.setattr(processes, "_clusters", lambda: SimpleNamespace(K8sCluster=cluster))
    with pytest.raises(ValueError, match="403 - Forbidden. Let the pod's service account read .*, or set RANK, WORLD"):
        detect(environ={"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"})


@pytest.mark.parametrize(
    ("visible", "local", "extra", "devices"),
    [
        ("0,1,2,3,4,5,6,7", (1, 4), {}, [2, 3]),
        ("0,1", (1, 2), {}, [1]),
        ("0,1,2,3", (0, 1), {}, None),
        ("3", (1, 4), {}, None),  # the launcher shows each its own
        ("0,1,2,3", (1, 2), {"owns_devices": True}, None),
    ],
    ids=["dealt out", "one each", "one process", "bound by the launcher", "bound, says slurm"],
)
def test_gpus_are_dealt_out_to_the_processes_of_a_host(visible, local, extra, devices):
    group = Group(source="a test", count=8, local_index=local[0], local_count=local[1], **extra)
    assert local_devices(group, {"CUDA_VISIBLE_DEVICES": visible}) == devices
    assert local_devices(group, {"CUDA_VISIBLE_DEVICES": visible, "JAX_LOCAL_DEVICE_IDS": "0"}) is None


@pytest.mark.parametrize(
    ("is_taken", "code", "message"),
    [
        (
            False,
            1,
            r"process 0 of 2: error: did not meet the others at 127.0.0.1:(\d+) within 1 s. Check that all 2 run",
        ),
        (True, 3, r"process 0 of 2 cannot listen at 127.0.0.1:(\d+): .* Give another port."),
    ],
    ids=["nobody comes", "port taken"],
)
def test_a_meeting_that_fails_says_where_it_was(is_taken, code, message):
    script = """
        import sys
        from jfsdp.processes import Group, connect
        try:
            connect(Group(source="a test", count=2, index=0, coordinator=f"127.0.0.1:{sys.argv[1]}"), timeout_s=1)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            sys.exit(3)
    """
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        port = str(taken.getsockname()[1])
        if is_taken:
            taken.listen()
        else:
            taken.close()
        command = [sys.executable, "-c", textwrap.dedent(script), port]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and re.search(message, done.stderr)[1] == port


def test_gpus_that_cannot_be_dealt_out_are_refused():
    with pytest.raises(ValueError, match="8 GPUs cannot be dealt out equally to the 3 processes .* such as 1 or 8"):
        local_devices(Group(source="a test", count=3, local_count=3), {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})


# ------------------------------------------------------------ many against one


def launch(count: int, *words: str, timeout: float = 240) -> subprocess.CompletedProcess:
    """Start processes on simulated devices, as a user does."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # as in this process, see conftest.py
    command = [sys.executable, "-m", "jfsdp.launch", "--nproc", str(count), *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


class Scenarios:
    """The scenarios in this process, on 8 devices, and in many; each started once, when a test asks for it."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cache  # noqa: B019
    def alone(self, setting) -> dict:
        return json.loads(json.dumps(process_scenarios.under(setting, self.folder / "1" / str(setting))))

    def launched(self, count: int, setting=SETTINGS[0]) -> tuple[list[dict], subprocess.CompletedProcess]:
        """What each of `count` processes saw, and what they printed; settings that are tested together share a start,
        and of four processes all do."""
        fast, slow = SETTINGS[:2], SETTINGS[2:]
        return self._launched(count, tuple(SETTINGS if count > 2 else fast if setting in fast else slow))

    @cache  # noqa: B019
    def _launched(self, count: int, together: tuple) -> tuple[list[dict], subprocess.CompletedProcess]:
        for setting in together:
            self.alone(setting)
        out = self.folder / f"{count}-{together[0]}"
        out.mkdir()
        words = ["-m", "tests.process_scenarios", str(out), str(self.folder / "1"), *map(str, together)]
        done = launch(count, *words, timeout=900)
        assert done.returncode == 0, done.stderr
        return [json.loads((out / f"{i}.json").read_text()) for i in range(count)], done


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    return Scenarios(tmp_path_factory.mktemp("processes"))


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2x4", "4x2"])
def count(request) -> int:
    """2 processes of 4 devices, or 4 of 2."""
    return request.param


@pytest.fixture(params=settings(2))
def setting(request):
    return request.param


@pytest.fixture
def alone(scenarios, setting):
    """What one process saw under a strategy and precision."""
    return scenarios.alone(setting)


@pytest.fixture
def seen(scenarios, count, setting):
    """What each of many saw under it."""
    return [one[str(setting)] for one in scenarios.launched(count, setting)[0]]


@pytest.fixture
def together(scenarios, count):
    """What each of many saw of what has nothing to do with either, and what they printed."""
    return scenarios.launched(count)


def test_many_processes_train_as_one_does(alone, seen, setting):
    """C-40, the values. Not bitwise: gloo adds in another order than the collectives inside a process do."""
    want = alone["training"]
    for got in (one["training"] for one in seen):
        assert got["placed"], "plan.place changed values"
        np.testing.assert_allclose(got["losses"][0], want["losses"][0], rtol=1e-6)
        rel = 1e-6 if setting.precision == "fp32" else setting.rounding
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=rel)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=rel)
        for ours, theirs in zip(got["params"], want["params"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # Adam divides by small numbers
    assert want["losses"][2] < want["losses"][0]


def test_every_process_sees_the_same(seen):
    first, *others = seen
    assert all(one == first for one in others)


@pytest.mark.parametrize("setting", [p for p in settings(2) if p.values[0].strategy == "HYBRID_SHARD"])
def test_shard_groups_lie_inside_a_process(seen):
    """C-40 with two processes: nothing but small statistics and the shard's all-reduce leaves one."""
    found, count = seen[0]["training"], len(seen)
    assert found["hosts"] == [[4 * row // (8 // count) + i // (8 // count) for i in range(4)] for row in range(2)]
    groups = {kind: {str(g) for k, g in found["groups"] if k == kind} for kind, _ in found["groups"]}
    shards = str([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert groups["all-gather"] == groups["reduce-scatter"] == {shards}
    assert str([[0, 4], [1, 5], [2, 6], [3, 7]]) in groups["all-reduce"]


def test_each_process_reads_its_own_part(alone, seen):
    """C-63: 8 different ids a batch, each once an epoch, in the order of the one-process run."""
    assert all(one["ids"] == alone["ids"] for one in seen)
    assert all(len(set(batch)) == 8 for batch in alone["ids"])
    assert sorted(sum(alone["ids"], [])) == list(range(32))


def test_shard_groups_lie_inside_a_host_whatever_the_numbers_of_processes(scenarios, together):
    """Processes on two hosts in turn: a shard group has one of the hosts, and rows lie as with one process."""
    for one in together[0]:
        assert one["cyclic"] == {"hosts": [[0], [1]], "ids": scenarios.alone(SETTINGS[1])["ids"]}


def test_metrics_describe_the_batch_of_all_processes(alone, seen):
    """C-70: loss and tokens over all devices, the same in every process; the gradient of this one is the loss."""
    for one in (alone, *seen):
        assert one["metrics"] == [[4.5, 8, 4.5], [3.0, 4, 3.0]]


def test_last_partial_batch_has_its_own_mean(alone, seen, setting):
    """C-61: of 21 examples by 8, the last batch has the loss and the gradient of 5, whichever process has them."""
    for one in (alone, *seen):
        assert [batch[:2] for batch in one["partial"]] == [[4.5, 8], [12.5, 8], [19.0, 5]]
        assert [batch[2] for batch in one["partial"]] == pytest.approx([4.5, 12.5, 19.0], rel=setting.rounding)


def test_an_evaluation_counts_every_example_once(alone, seen):
    """C-71: 66 examples are 9 batches, the last of which leaves the second process none; 3 leave it none at all."""
    for one in (alone, *seen):
        assert one["evaluations"] == [[66 * 65 / 2, 66, 9], [3, 3, 1]]


def test_a_schedule_counts_optimizer_steps(together):
    """C-30 in several processes."""
    for rates in (one["rates"] for one in (*together[0], {"rates": process_scenarios.learning_rates()})):
        assert rates == [0.25, 0.5, 0.75, 1.0]


def test_checkpoints_go_on_with_any_number_of_processes(alone, seen, setting, scenarios, count):
    """C-59, C-43: from 1x8 to 2x4 or back, from one process to many and back: every leaf bitwise, the same masks as
    never stopped. A local checkpoint goes on where it was saved."""
    want = alone["masks"]
    assert len(set(want["all"])) == 6 and all(0 < mask < 2**16 for mask in want["all"])
    for got in (one["masks"] for one in (alone, *seen)):
        assert got["all"] == want["all"]
        assert got["resumed"] == {"state": got["saved"], "masks": want["all"][4:]}
        assert got["local"] == got["saved"]
    for got in (one["resumed"] for one in seen):
        assert got == {"state": want["saved"], "masks": want["all"][4:]}
    (theirs,) = scenarios.folder.glob(f"{count}-*/checkpoints/{setting}")
    back = json.loads(json.dumps(process_scenarios.resumed(setting, theirs)))
    assert back == {"state": seen[0]["masks"]["saved"], "masks": want["all"][4:]}


def test_one_vote_decides_for_all(together):
    seen, _ = together
    indices = list(range(len(seen)))
    for one in seen:
        assert one["votes"] == [False, True, {"index": indices, "seconds": [0.5] * len(seen)}]


def test_processes_that_were_started_otherwise_are_refused(tmp_path, together):
    """Each with its own folder for checkpoints: each would save a part, and none would ever be complete."""
    assert process_scenarios.refusals(tmp_path / "checkpoints") == []
    for one in together[0]:
        option, shared = one["refusals"]
        names = "checkpoints-of-0 in process 0, checkpoints-of-1 in process 1"
        want = f"--checkpoint-dir differs between the {len(together[0])} processes: {names}. Start all with the same"
        assert option.startswith(want)
        others = ", ".join(map(str, range(1, len(together[0]))))
        assert f"of process 0 is not there for process {others}. Name a folder for checkpoints that all" in shared


def test_a_warning_has_the_index_of_its_process(together):
    """C-69, warnings."""
    seen, done = together
    (line,) = [line for line in done.stderr.splitlines() if "UserWarning: a warning from the second" in line]
    assert line.startswith("[1] ") and f"process 1 of {len(seen)}: /" in line


# ------------------------------------------------------------ how a run of many ends


@pytest.fixture
def one_of_two(monkeypatch):
    """As in process 1 of 2; gives the codes with which it left."""
    left = []
    monkeypatch.setattr(processes, "_here", Group(source="a test", count=2, index=1))
    monkeypatch.setattr(processes, "leave", left.append)
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: left.append(f"waited {seconds} s"))
    return left


@pytest.mark.parametrize(
    ("error", "left", "said"),
    [
        (SystemExit(2), [2], ""),
        (SystemExit(0), [], ""),
        (SystemExit(), [], ""),
        (KeyError("mesh"), [1], r"process 1 of 2: failed\nTraceback .*KeyError: 'mesh'"),
        (
            jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection closed by peer\nmore"),
            ["waited 35 s", 1],
            "process 1 of 2: error: a collective failed, so another process has ended.* by peer",
        ),
    ],
    ids=["refused", "ended", "ended, no code", "mistake", "another one is gone"],
)
def test_a_process_that_fails_leaves_at_once(one_of_two, capsys, error, left, said):
    with pytest.raises(type(error)), processes.together():
        raise error
    assert one_of_two == left
    assert re.search(said, capsys.readouterr().err, re.DOTALL)


def test_alone_it_ends_as_ever(capsys):
    with pytest.raises(KeyError), processes.together():
        raise KeyError("mesh")
    assert capsys.readouterr().err == ""


def test_processes_that_do_not_fit_are_refused(capsys):
    """Before JAX starts, with exit code 2; the mesh counts the devices of all processes."""
    for words, message in (
        ("--coordinator h:1 --dry-run", "--coordinator given, but not --num-processes and --process-id"),
        ("--hang-timeout 0", "hang_timeout is 0.0; use seconds above 0, or None"),
    ):
        with pytest.raises(SystemExit) as exit:
            train.main(words.split())
        assert exit.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(ValueError, match="9 simulated devices do not split equally over 2 processes. Simulate 8 or 10"):
        cli.start(DeviceConfig(simulate=9), 2)
    with pytest.raises(ValueError, match="mesh 1x8 has devices of 1 of the 2 processes only. Use a mesh over all 8"):
        cli.start(DeviceConfig(mesh="1x8"), 2)


def test_a_dry_run_tells_what_was_detected(capsys):
    assert train.main(["--dry-run", "--model", "llama-tiny"]) == 0
    assert "processes  1 (neither torchrun, Open MPI, Slurm, a Kubernetes job nor" in capsys.readouterr().out


EACH = pytest.mark.parametrize("setting", settings(1))
BOTH = pytest.mark.parametrize("setting", settings(0)[:2])  # strategies and precisions, where a run takes long
ONE = pytest.mark.parametrize("setting", settings(0)[:1])


@pytest.fixture
def options(setting, tmp_path) -> list[str]:
    """A run that takes seconds, and would take 9 steps."""
    config = dict(model_type="llama", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config |= dict(num_key_value_heads=1, intermediate_size=32, rms_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))
    words = f"--model {tmp_path}/config.json --data {tmp_path}/text.txt --seq-len 32 --held-out 0 --steps 9"
    return [*words.split(), *setting.options]


@pytest.mark.slow  # lines and file of two processes are seen in the next test, an index before a warning above
@EACH
def test_one_line_per_event(options, tmp_path):
    """C-69: 5 steps by two processes, one metric file, then an error of process 1, with its index."""
    done = launch(2, "-m", "tests.process_faults", "1", "5", "raise", *options, "--metrics", str(tmp_path / "m.jsonl"))
    shown = re.findall(r"^(?:\[1\] )?step (\d)/9", done.stdout, re.MULTILINE)
    written = [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert shown == list("12345") and written == [1, 2, 3, 4, 5]
    assert [path.name for path in tmp_path.glob("*.jsonl*")] == ["m.jsonl"]
    (error,) = [line for line in done.stderr.splitlines() if "the disk is gone" in line]
    assert error.startswith("[1] train.py: process 1 of 2: error: the data cannot be read any further: the disk")
    assert "jfsdp.launch: process 1 failed with exit code 1" in done.stderr and done.returncode == 1
    assert re.search(r"processes +2 \(torchrun's variables\), coordinator 127.0.0.1:\d+, 4 devices each", done.stdout)


def seconds_since_the_fault(tmp_path: Path) -> float:
    return time.time() - float((tmp_path / "fault").read_text())


def steps_of(file: Path) -> dict[int, float]:
    """Loss by step."""
    return {line["step"]: line["loss"] for line in map(json.loads, file.read_text().splitlines())}


@EACH
def test_one_process_that_is_killed_ends_all_and_the_run_goes_on(options, setting, tmp_path):
    """C-68: gone within 60 s, non-zero, the log names who failed; the last checkpoint is good, here for one process.

    C-69: until then, each step of both has one line on the console and one in the one metric file.
    """
    options += ["--checkpoint", str(tmp_path / "run"), "--save-every", "1"]
    metrics = "--metrics", str(tmp_path / "m.jsonl")
    done = launch(2, "-m", "tests.process_faults", "1", "3", "kill", *options, *metrics)
    assert seconds_since_the_fault(tmp_path) < 60
    shown = re.findall(r"^(?:\[1\] )?step (\d)/9", done.stdout, re.MULTILINE)
    written = [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    for lines in (list(map(int, shown)), written):
        assert lines == [1, 2, 3][: max(len(lines), 2)]
    assert [path.name for path in tmp_path.glob("*.jsonl*")] == ["m.jsonl"]
    first = next(line for line in done.stderr.splitlines() if line.startswith("jfsdp.launch"))
    assert "process 1 was ended by SIGKILL" in first and "ending process 0" in first
    assert done.returncode == 137

    assert train.main([*options, "--metrics", str(tmp_path / "resumed.jsonl")]) == 0
    assert train.main([*options[:-4], "--metrics", str(tmp_path / "whole.jsonl")]) == 0
    resumed, whole = steps_of(tmp_path / "resumed.jsonl"), steps_of(tmp_path / "whole.jsonl")
    assert min(resumed) in (2, 3, 4) and max(resumed) == 9
    rel = 1e-6 if setting.precision == "fp32" else setting.rounding
    assert resumed == pytest.approx({step: whole[step] for step in resumed}, rel=rel)


@pytest.mark.slow  # like a process that is killed, and like test_one_line_per_event, up to which process it is
@EACH
def test_one_process_whose_data_fails_ends_all(options, tmp_path):
    """C-68, an exception in the data loader of process 0 only."""
    done = launch(2, "-m", "tests.process_faults", "0", "3", "raise", *options)
    assert seconds_since_the_fault(tmp_path) < 60 and done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if line.startswith("jfsdp.launch"))
    assert "process 0 failed with exit code 1" in first and "ending process 1" in first


@ONE
def test_one_process_that_hangs_ends_all_with_its_stacks(options):
    """Nothing raises, so only the clock can tell: every process says where it stands."""
    done = launch(2, "-m", "tests.process_faults", "1", "3", "hang", *options, "--hang-timeout", "60")
    assert done.returncode == 1
    for index in range(2):
        assert f"process {index} of 2: error: nothing was done for 60 s, the last was step 3." in done.stderr
    assert re.search(r"^\[1\] .* in sleep_forever$", done.stderr, re.MULTILINE)


@BOTH
def test_a_signal_to_one_process_stops_all_after_the_same_step(options, tmp_path):
    """The run ends in good order, summary and all; with processes a step apart it would hang."""
    done = launch(2, "-m", "tests.process_faults", "1", "3", "stop", *options, "--metrics", str(tmp_path / "m.jsonl"))
    steps = len((tmp_path / "m.jsonl").read_text().splitlines())
    assert done.returncode == 143 and 3 <= steps <= 5 and f"{steps} of 9" in done.stdout
    assert "Over all processes" in done.stdout and "error" not in done.stderr and "jfsdp.launch" not in done.stderr


@BOTH
def test_kills_of_one_process_or_the_other_change_nothing(options, tmp_path, monkeypatch):
    """A run of two, one of which is killed at a random moment five times, ends as the run that nobody disturbed."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    options[options.index("--steps") + 1] = "60"
    calm = ["--checkpoint", str(tmp_path / "calm"), "--save-every", "3", "--metrics", str(tmp_path / "calm.jsonl")]
    killed = [word.replace("calm", "killed") for word in calm]
    assert launch(2, "train.py", *options, *calm).returncode == 0
    rng, done = random.Random(0), 0
    for _ in range(5):
        at = str(done + rng.randint(2, 9))
        ended = launch(2, "-m", "tests.process_faults", str(rng.randint(0, 1)), at, "later", *options, *killed)
        assert ended.returncode == 137, ended.stderr
        done = max(Checkpoints(tmp_path / "killed").steps(), default=0)
    assert 0 < done < 60
    assert launch(2, "train.py", *options, *killed).returncode == 0
    assert steps_of(tmp_path / "killed.jsonl") == steps_of(tmp_path / "calm.jsonl")
    ends = [open_checkpoint(tmp_path / name).metadata.leaves for name in ("calm", "killed")]
    assert ends[0] == ends[1] and all(leaf.hash for leaf in ends[0].values())  # of all that is in the state


@EACH
def test_consolidated_save_does_not_multiply_host_memory(setting, tmp_path):
    """C-37: 256 MiB in 64 tensors, by two processes. A tensor and some chunks: 64 MiB in the one that writes none."""
    done = launch(2, "-m", "tests.process_memory", str(tmp_path), str(setting), timeout=500)
    assert done.returncode == 0, done.stderr
    grown = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    assert grown[0] < 128 << 20 and grown[1] < 64 << 20
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) >= 256 << 20


@ONE
def test_one_process_that_is_late_is_waited_for(options):
    """With its first batch and at the end, by 35 s: Gloo connects, and JAX shuts down, within 30 s unless told."""
    done = launch(2, "-m", "tests.process_faults", "1", "0", "late", *options)
    assert done.returncode == 0 and "9 of 9" in done.stdout and "SIGABRT" not in done.stderr, done.stderr


@ONE
def test_without_a_launcher_the_others_end_when_the_heartbeat_stops(options, tmp_path):
    """C-68 where the scheduler does nothing: the process that is left ends itself, and JAX names who is gone."""
    who = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29871")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | who
    command = [sys.executable, "-m", "tests.process_faults", "1", "3", "kill", *options]
    both = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(i)}, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    said = [one.communicate(timeout=240)[1] for one in both]
    assert seconds_since_the_fault(tmp_path) < 60
    assert both[1].returncode == -9 and both[0].returncode != 0
    assert re.search(r"stopped sending heartbeats\):\s+1\b|Task 1 heartbeat timeout", said[0])
