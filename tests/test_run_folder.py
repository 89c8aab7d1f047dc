"""`jfsdp.run_folder`: which checkpoints of a run are there, and that a save that fails costs nothing else."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from jfsdp import store
from jfsdp.checkpoint import restore
from jfsdp.layout import make_plan
from jfsdp.precision import parse_dtype
from jfsdp.run_folder import Checkpoints, SaveError
from jfsdp.state import TrainState

from .support import settings, submesh


@pytest.fixture(params=settings())
def small(request):
    """A state without a model's weight, to save at any step."""
    setting, tx = request.param, optax.sgd(0.1)
    params = {"w": np.ones((8, 2), parse_dtype(setting.precision))}
    plan = make_plan(params, submesh(setting.mesh), precision=setting.policy)
    state = TrainState.create(plan.place(params), tx, plan)
    at = lambda step: replace(state, step=jax.device_put(np.int32(step), state.step.sharding))  # noqa: E731
    return at, TrainState.abstract(tx, plan)


def test_failed_save_is_reported_and_older_checkpoints_stay(tmp_path, small):
    """C-44: a plain file lies where step 4 must go; the error comes at the save, step 2 can be restored."""
    at, wanted = small
    (tmp_path / "step_00000004").write_text("in the way")
    checkpoints = Checkpoints(tmp_path, newest=2)
    checkpoints.save(at(2))
    with pytest.raises(SaveError, match="of step 4 could not be written.*already exists.*complete one is of step 2"):
        checkpoints.save(at(4))
    assert int(restore(tmp_path, wanted).step) == 2
    checkpoints.save(at(6))  # whoever goes on can save again
    checkpoints.close()
    assert checkpoints.steps() == [2, 6]


def test_failed_background_write_surfaces_at_the_next_check(tmp_path, small, monkeypatch):
    """C-44: the write fails behind the training; old checkpoints are not removed, the state is still there."""
    at, wanted = small
    checkpoints = Checkpoints(tmp_path, newest=1)
    checkpoints.save(at(2))
    checkpoints.wait()
    with monkeypatch.context() as broken:
        broken.setattr(
            store, "write_zarr", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        checkpoints.save(at(4))
        checkpoints._handler._pool.submit(lambda: None).result()
        with pytest.raises(SaveError, match="step 4 .*No space left.* complete one is of step 2. Make room"):
            for _ in range(1000):
                checkpoints.check()
    assert checkpoints.steps() == [2]
    checkpoints.save(at(5))
    checkpoints.close()
    assert checkpoints.steps() == [5] and int(restore(tmp_path, wanted).step) == 5


FULL_DISK = """
import resource, signal, sys
import jax, numpy as np, optax
from jfsdp.run_folder import Checkpoints, SaveError
from jfsdp import TrainState, make_mesh, make_plan

params = {"w": np.random.default_rng(0).normal(size=(1 << 18,)).astype(np.float32)}
plan = make_plan(params, make_mesh("auto"))
state = TrainState.create(plan.place(params), optax.sgd(0.1), plan)
checkpoints = Checkpoints(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    checkpoints.save(state)
    checkpoints.wait()
except SaveError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(state)
checkpoints.close()
print(checkpoints.steps(), np.array_equal(np.asarray(state.params["w"]), params["w"]))
"""


def test_file_that_cannot_be_written_is_named_and_the_state_survives(tmp_path):
    """A limit on the size of files stands for a full disk; what failed leaves no checkpoint, and a retry succeeds."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, after = done.stdout.splitlines()[-2:]
    assert "checkpoint of step 0 could not be written" in said and "params.w/c/" in said and "too large" in said.lower()
    assert after == "[0] True"


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB of its own, and what changes its options: `change("size=32m")`."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)

    if shutil.which("mount") is None or mount("-t", "tmpfs", "-o", "size=8m", "tmpfs").returncode:
        pytest.skip("no file system can be mounted here: that takes Linux and root")
    yield folder, lambda options: mount("-o", f"remount,{options}").check_returncode()
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_full_disk_costs_neither_the_state_nor_the_checkpoint_before(disk, kind):
    """C-44: what was written of the one that failed goes, so nothing else runs out of room; a retry succeeds."""
    folder, change = disk
    params = {"w": np.random.default_rng(0).normal(size=(1 << 20,)).astype(np.float32)}  # 4 MiB, so one fits
    plan = make_plan(params, submesh("1x8"))
    state = TrainState.create(plan.place(params), optax.sgd(0.1), plan)
    at = lambda step: replace(state, step=jax.device_put(np.int32(step), state.step.sharding))  # noqa: E731
    wanted = TrainState.abstract(optax.sgd(0.1), plan)
    with Checkpoints(folder, kind=kind) as checkpoints:
        checkpoints.save(at(2))
        checkpoints.wait()
        checkpoints.save(at(4))
        with pytest.raises(SaveError, match=r"step 4 .*No space left on device.*complete one is of step 2\. Make room"):
            checkpoints.wait()
        assert [path.name for path in folder.glob("[!.]*")] == ["step_00000002"]
        assert np.array_equal(restore(folder, wanted).params["w"], params["w"])
        change("size=32m")
        checkpoints.save(at(4))
    back = restore(checkpoints.path(4), wanted)
    assert int(back.step) == 4 and np.array_equal(back.params["w"], params["w"])


def test_disk_that_becomes_read_only_is_told_of_at_the_save_and_refused_at_the_start(disk, small):
    (folder, change), (at, wanted) = disk, small
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(at(2))
        checkpoints.wait()
        checkpoints._lock.close()  # mount asks for nothing to be open; a disk that breaks does not
        change("ro")
        with pytest.raises(SaveError, match="step 4 could not be written.*Read-only file system.*is of step 2"):
            checkpoints.save(at(4))
    with pytest.raises(OSError, match="cannot be written to .*Read-only file system.*Name another folder"):
        Checkpoints(folder)
    assert int(restore(folder, wanted).step) == 2  # reading needs no more


def test_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written to .*file/run.*Name another folder"):
        Checkpoints(tmp_path / "file" / "run")


def test_unfinished_saves_of_a_killed_run_are_removed(tmp_path, small):
    at, _ = small
    for name in ("step_00000004.orbax-checkpoint-tmp", "step_00000001.deleted"):
        (tmp_path / name).mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert not list(tmp_path.glob("[!.]*")) and checkpoints.steps() == []
        checkpoints.save(at(4))


def test_second_run_in_a_folder_is_refused_and_leaves_the_first_its_save(tmp_path, small):
    """It would remove what the first is writing; when the first has ended, however it did, the folder is free."""
    at, _ = small
    script = "import sys; from jfsdp.run_folder import Checkpoints; c = Checkpoints(sys.argv[1]); print(); input()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "\n"
        (tmp_path / "step_00000004.orbax-checkpoint-tmp").mkdir()
        who = rf"process {first.pid} on {re.escape(socket.gethostname())}"
        with pytest.raises(OSError, match=rf"another run saves in .* \({who}\). Let it end, or name another folder"):
            Checkpoints(tmp_path)
        assert (tmp_path / "step_00000004.orbax-checkpoint-tmp").exists()
        first.kill()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(4))
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["step_00000004"]


# Which are kept


def test_best_and_newest_are_kept(tmp_path, small):
    """C-50: keep 2, worse at every save; the newest always survives, the best too, and resume begins at 500."""
    at, wanted = small
    with Checkpoints(tmp_path, newest=1, best=1) as checkpoints:
        for step in (100, 200, 300, 400, 500):
            checkpoints.save(at(step), metric=step / 100)
            checkpoints.wait()
            assert step in checkpoints.steps() and len(checkpoints.steps()) <= 2
    with Checkpoints(tmp_path, newest=1, best=1) as checkpoints:
        state, metadata = checkpoints.restore(wanted)
        assert int(state.step) == metadata.step == 500
        assert checkpoints.best_step() == 100 and checkpoints.steps() == [100, 500]


def test_metric_that_is_no_number_is_never_the_best(tmp_path, small):
    at, _ = small
    with Checkpoints(tmp_path, newest=1, best=1) as checkpoints:
        for step, metric in ((1, float("nan")), (2, 3.0), (3, 2.0), (4, float("nan")), (5, 9.0)):
            checkpoints.save(at(step), metric=metric)
            checkpoints.wait()
        assert checkpoints.best_step() == 3 and checkpoints.steps() == [3, 5]


def test_step_that_is_damaged_again_is_set_aside_beside_the_first(tmp_path, small):
    at, wanted = small
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(1))
    for _ in range(3):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(at(2))
            checkpoints.wait()
            (checkpoints.path(2) / "jfsdp.json").write_text("")
            assert checkpoints.restore(wanted)[1].step == 1
    assert sorted(path.name for path in tmp_path.glob("*2*")) == [f"step_00000002.damaged{n}" for n in ("", 1, 2)]


def test_old_checkpoints_are_deleted_behind_the_training(tmp_path, small, monkeypatch):
    """A folder of many files takes a while to go: the loop does not wait for it, the next save does."""
    at, _ = small
    may_go, delete = threading.Event(), shutil.rmtree

    def slowly(path, **options):
        assert not str(path).endswith(".deleted") or may_go.wait(60)
        delete(path, **options)

    with Checkpoints(tmp_path, newest=1) as checkpoints:
        monkeypatch.setattr(shutil, "rmtree", slowly)
        for step in (1, 2):
            checkpoints.save(at(step))
            while not checkpoints.path(step).exists():
                checkpoints.check()
            checkpoints.check()
        assert checkpoints.steps() == [2] and (tmp_path / "step_00000001.deleted").exists()
        may_go.set()
        checkpoints.wait()
        assert not (tmp_path / "step_00000001.deleted").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_writing_takes_spare_time_and_training_keeps_its_own(tmp_path, small, monkeypatch, kind):
    at, _ = small
    name = {"sharded": "write_zarr", "local": "write_local"}[kind]
    write, seen = getattr(store, name), []
    priority = lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())  # noqa: E731
    before = priority()
    monkeypatch.setattr(store, name, lambda *a, **k: (seen.append(priority()), write(*a, **k))[1])
    with Checkpoints(tmp_path, kind=kind) as checkpoints:
        checkpoints.save(at(2))
        checkpoints.save(at(4))
    assert seen == [min(before + 10, 19)] * 2, "once lowered, not lower still"
    assert priority() == before


def test_a_step_is_saved_once(tmp_path, small):
    """C-51: also when it was restored."""
    at, wanted = small
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.save(at(3)) and not checkpoints.save(at(3))
    with Checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.restore(wanted)
        assert not checkpoints.save(state)


@pytest.mark.parametrize("options", [dict(newest=0), dict(best=-1), dict(kind="zip")], ids=str)
def test_settings_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="[Uu]se "):
        Checkpoints(tmp_path, **options)
