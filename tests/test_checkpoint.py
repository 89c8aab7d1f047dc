"""`jfsdp.checkpoint`: what was saved comes back bitwise on any mesh, whole or not at all, and nothing is lost.

A state is trained and saved once for each strategy and precision; most tests restore from it or damage a copy. The
judge is the gathered NumPy values taken before the save, and for files on disk readers that are not ours.
"""

import json
import logging
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jfsdp import checkpoint, store
from jfsdp.checkpoint import DamagedCheckpoint, open_checkpoint, restore
from jfsdp.consolidated import consolidate, load_consolidated, save_consolidated
from jfsdp.contents import inspect_command
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.metrics import compilations
from jfsdp.offload import OffloadPolicy
from jfsdp.precision import LossScale
from jfsdp.randomness import example_keys
from jfsdp.run_folder import Checkpoints
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import unshard

from .support import HYBRID, PLAIN, Setting, bitwise_equal, settings, submesh

UNEVEN = (1, 3, 5, 7, 9, 13, 17)


def make_params(layers=2, width=8):
    """Two blocks, the seven uneven parameters and a scalar (C-02, C-04)."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.3  # noqa: E731
    uneven = {f"u{n}": draw(n, 6) for n in UNEVEN}
    return {"blocks": {"w": draw(layers, width, 8), "scale": draw(layers, width)}, "uneven": uneven, "s": draw()}


def loss(params, batch, key):
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (8,)))(example_keys())  # a mask that no mesh changes
    x, _ = run_stack(
        lambda w, x, _: (x + jnp.tanh(x @ w["w"].T) @ w["w"] * w["scale"], None), params["blocks"], batch["x"]
    )
    uneven, s = unshard((params["uneven"], params["s"]))
    spread = sum((x[:, :6] @ u.T).mean(-1) for u in uneven.values())
    return ((x * keep).mean(-1) + spread * s - batch["y"]) ** 2 @ batch["w"], batch["w"].sum()


def optimizer(moment=None):
    return optax.adamw(1e-2, mu_dtype=moment)


def make_plan_on(mesh, strategy=None, params=None, **options):
    units = {"blocks": UnitOptions(stacked=True)}
    return make_plan(
        make_params() if params is None else params, submesh(mesh), strategy=strategy, units=units, **options
    )


def make_batch(step=0, rows=16):
    rng = np.random.default_rng(step)
    x, y, w = rng.normal(size=(rows, 8)), rng.normal(size=rows), np.arange(rows) % 3
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "w": w.astype(np.float32)}


def make_step(setting, mesh=None, strategy=None):
    """Plan, optimizer and step of a setting, or of its precision on another mesh, with another strategy."""
    plan = make_plan_on(mesh or setting.mesh, strategy, precision=setting.policy)
    tx = optimizer(moment(setting))
    return plan, tx, train_step(loss, tx, plan)


def values(state):
    """Every leaf in its logical shape, by name, as NumPy."""
    arrays = checkpoint.named_arrays(state, state.plan)
    return {n: np.array(v)[tuple(map(slice, arrays.shapes[n]))] for n, v in arrays.values.items()}


def moment(setting: Setting) -> str:
    """The dtype of the first moment: what is computed in bf16 keeps that one in bf16, too (C-52)."""
    return {"fp32": "float32", "bf16": "bfloat16"}[setting.precision]


class Saved(NamedTuple):
    """A run saved after 3 steps."""

    setting: Setting
    folder: Path
    values: dict[str, np.ndarray]
    """What was in it."""
    losses: list[float]
    """Of steps 4 to 6."""
    ended: dict[str, np.ndarray]
    """Values after step 6."""


@pytest.fixture(scope="module", params=settings(2))
def saved(request, tmp_path_factory):
    return _train_and_save(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=settings(1))
def run(request, tmp_path_factory):
    """The same, for what costs more to try."""
    return _train_and_save(request.param, tmp_path_factory)


_done = {}


def _train_and_save(setting, tmp_path_factory):
    if setting not in _done:
        folder = tmp_path_factory.mktemp(str(setting))
        plan, tx, step = make_step(setting)
        state = TrainState.create(plan.place(make_params()), tx, plan, seed=5)
        count = jax.device_put(np.int32(9997), state.step.sharding)
        state = replace(state, opt_state=optax.tree.set(state.opt_state, count=count))
        for i in range(3):
            state, _ = step(state, make_batch(i))
        want = values(state)
        with Checkpoints(folder) as checkpoints:
            assert checkpoints.save(state, metric=0.5, data={"step": 3}, run={"note": "kept"})
        losses = []
        for i in range(3, 6):
            state, metrics = step(state, make_batch(i))
            losses.append(float(metrics["loss"]))
        _done[setting] = Saved(setting, folder, want, losses, values(state))
    return _done[setting]


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the saved run to be damaged: folder of the run, folder of its checkpoint, and what to restore to."""
    shutil.copytree(run.folder, tmp_path / "run")
    return tmp_path / "run", tmp_path / "run" / "step_00000003", like(run.setting)


def like(setting, mesh=None, strategy=None):
    plan, tx, _ = make_step(setting, mesh, strategy)
    return TrainState.abstract(tx, plan)


# Onto any mesh and strategy

PLACES = [("1x1", "FULL_SHARD"), ("1x2", "FULL_SHARD"), ("1x4", "SHARD_OPT"), ("1x8", "FULL_SHARD")]
PLACES += [("2x4", s) for s in (*PLAIN[1:], *HYBRID)]


@pytest.mark.parametrize(("mesh", "strategy"), PLACES, ids=str)
def test_every_leaf_comes_back_bitwise_on_any_mesh_and_strategy(saved, mesh, strategy):
    """C-57: parameters, moments, counts and key; padded, whole and scalar ones. C-04: shape () stays. C-52: dtypes,
    a moment in bf16 and a large count."""
    want, wanted = saved.values, like(saved.setting, mesh, strategy)
    state = restore(saved.folder, wanted)
    assert bitwise_equal(values(state), want)
    for got, asked in zip(jax.tree.leaves(state), jax.tree.leaves(wanted)):
        assert got.sharding.is_equivalent_to(asked.sharding, got.ndim) and got.dtype == asked.dtype
    assert want["params.s"].shape == () and want["params.uneven.u13"].shape == (13, 6)
    count, mu, nu = (want[f"opt_state.0.{name}"] for name in ("count", "mu.uneven.u5", "nu.uneven.u5"))
    assert (count.dtype, mu.dtype, nu.dtype) == (np.int32, np.dtype(moment(saved.setting)), np.float32)
    assert count == 10000
    assert jax.random.key_impl(state.key) == jax.random.key_impl(jax.random.key(0))


@pytest.mark.parametrize(("mesh", "strategy"), PLACES, ids=str)
def test_training_goes_on_on_any_mesh_and_strategy(run, mesh, strategy):
    """C-57, C-59: the same losses, masks included. C-76: one compilation. C-72: the restored state can be donated."""
    plan, tx, step = make_step(run.setting, mesh, strategy)
    state = restore(run.folder, TrainState.abstract(tx, plan))
    before, losses = compilations("_step"), []
    for i in range(3, 6):
        state, metrics = step(state, make_batch(i))
        losses.append(float(metrics["loss"]))
    assert compilations("_step") - before == 1
    if (mesh, strategy) == (run.setting.mesh, run.setting.strategy):
        assert losses == run.losses and bitwise_equal(values(state), run.ended)
    else:
        np.testing.assert_allclose(losses, run.losses, rtol=run.setting.rounding)


def test_restored_leaves_share_no_buffer(run):
    """C-72: also where all devices hold a copy."""
    state = restore(run.folder, like(run.setting, "2x4", "NO_SHARD"))
    buffers = Counter(
        (s.device.id, s.data.unsafe_buffer_pointer()) for x in jax.tree.leaves(state)[:-1] for s in x.addressable_shards
    )
    pointers = Counter(pointer for _, pointer in buffers)
    assert max(buffers.values()) == max(pointers.values()) == 1


def test_buffers_keep_their_kind(tmp_path):
    """C-25: integers, booleans and a counter bitwise; floats in the dtype that they have at rest. C-29: an average."""
    plan, tx = make_plan_on("1x8"), optimizer()
    buffers = {
        "positions": np.arange(300, dtype=np.int32),
        "mask": np.arange(7) % 2 == 0,
        "count": np.uint32(4_000_000_000),
        "rotary": np.linspace(0, 1, 33, dtype=np.float32),
        "stream": jax.random.key(3, impl="rbg"),
    }
    state = TrainState.create(plan.place(make_params()), tx, plan, buffers=buffers)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    back = restore(tmp_path, TrainState.abstract(tx, make_plan_on("2x4"), buffers=buffers))
    stream = back.buffers.pop("stream")
    assert str(jax.random.key_impl(stream)) == "rbg"
    assert np.array_equal(jax.random.key_data(stream), jax.random.key_data(buffers.pop("stream")))
    for name, value in buffers.items():
        assert back.buffers[name].dtype == value.dtype and np.array_equal(back.buffers[name], value)


def test_average_is_saved_restored_and_exported_in_its_own_shapes(tmp_path):
    """C-29: float32, uneven parameters, onto another mesh; C-20's scale goes along. A state without it is told so."""
    plan, tx = make_plan_on("1x8"), optimizer()
    state = TrainState.create(plan.place(make_params()), tx, plan, ema=True, loss_scale=LossScale())
    step = train_step(loss, tx, plan, ema=0.9)
    for i in range(2):
        state, _ = step(state, make_batch(i))
    want = values(state)
    assert not np.array_equal(want["ema.uneven.u5"], want["params.uneven.u5"])
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
    other = make_plan_on("2x4")
    back = restore(tmp_path / "run", TrainState.abstract(tx, other, ema=True, loss_scale=LossScale()))
    assert bitwise_equal(values(back), want)
    consolidate(tmp_path / "run", tmp_path / "out", part="ema")
    exported = load_consolidated(tmp_path / "out", other)
    assert np.array_equal(np.asarray(other.unpad(exported)["uneven"]["u5"]), want["ema.uneven.u5"])
    with pytest.raises(ValueError, match=r"ema.uneven.u5 \[5, 6\] is only in the checkpoint") as error:
        restore(tmp_path / "run", TrainState.abstract(tx, other))
    assert "scale." in str(error.value)


def test_offloaded_state_comes_back_into_host_memory(tmp_path, run):
    options = dict(
        units={"blocks": UnitOptions(stacked=True)}, offload_policy=OffloadPolicy(params=True, opt_state=True)
    )
    plan = make_plan(make_params(), submesh("1x8"), **options)
    state = restore(run.folder, TrainState.abstract(optimizer(moment(run.setting)), plan))
    assert bitwise_equal(values(state), run.values)
    assert {x.sharding.memory_kind for x in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {"pinned_host"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    assert bitwise_equal(values(restore(tmp_path, like(run.setting, "2x4"))), run.values)


# On disk


def test_disk_holds_every_value_once_and_no_padding(saved):
    """C-48: bytes of files by Zarr's own format: values, 4 of checksum a chunk, 16 of index a chunk, 4 of checksum."""
    arrays, want = saved.folder / "step_00000003" / "arrays", saved.values
    for name, value in want.items():
        meta = json.loads((arrays / name / "zarr.json").read_text())
        assert tuple(meta["shape"]) == value.shape
        chunk = meta["chunk_grid"]["configuration"]["chunk_shape"]
        inner = meta["codecs"][0]["configuration"]["chunk_shape"]
        size = int(np.prod(inner)) * value.dtype.itemsize
        files = [p for p in arrays.joinpath(name).rglob("*") if p.is_file() and p.name != "zarr.json"]
        index = 16 * int(np.prod(chunk) // np.prod(inner)) + 4
        assert sum(p.stat().st_size for p in files) == value.nbytes + 4 * value.nbytes // size + index * len(files)
    shards = {"FULL_SHARD": 8, "HYBRID_SHARD": 4}[saved.setting.strategy]
    uneven = [p for p in (arrays / "params.uneven.u13" / "c").rglob("*") if p.is_file()]
    assert len(uneven) == -(-13 // -(-13 // shards))  # a file for every shard that is not all padding


def test_large_arrays_are_cut_into_chunks_that_another_mesh_reads_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_CHUNK_BYTES", 32)
    x = np.random.default_rng(0).normal(size=(3, 26, 4)).astype(np.float32)
    mesh = submesh("1x4")
    padded = jax.device_put(np.pad(x, [(0, 0), (0, 2), (0, 0)]), jax.NamedSharding(mesh, PartitionSpec(None, "shard")))
    store.write_zarr(tmp_path, store.to_host({"x": padded}, {"x": x.shape}), is_first=True)
    inner = json.loads((tmp_path / "x" / "zarr.json").read_text())["codecs"][0]["configuration"]["chunk_shape"]
    assert inner == [1, 1, 4]
    part = (slice(1, 3), slice(5, 23), slice(1, 3))
    assert np.array_equal(store.ZarrReader(tmp_path).read("x", part), x[part])


@pytest.mark.parametrize(("chunk", "shape"), [((16, 128, 1024), (16, 1024, 1024)), ((64, 4096), (512, 4096))], ids=str)
def test_more_devices_find_their_parts_in_chunks_of_their_own(chunk, shape):
    """Twice to eight times as many shards begin and end where chunks do, so no byte is read for two of them."""
    inner = store._inner_chunk(list(chunk), shape, 4)
    d = next(d for d in range(len(shape)) if chunk[d] < shape[d])
    assert all(c % i == 0 for c, i in zip(chunk, inner)) and 8 * inner[d] == chunk[d]
    assert 16 << 10 <= np.prod(inner) * 4 <= 4 << 20


def test_metadata_says_what_was_saved_and_inspect_shows_it(saved, capsys):
    """C-31: the generator; C-65: the strategy; counters, data position, what the caller added."""
    found = open_checkpoint(saved.folder).metadata
    assert found.step == 3 and found.counters == {"batches": 3, "skipped": 0, "updates": 3}
    assert found.data == {"step": 3} and found.run == {"note": "kept"} and found.metric == 0.5
    assert found.strategy == saved.setting.strategy
    assert found.generator == {"jax_default_prng_impl": "threefry2x32", "jax_threefry_partitionable": True}
    assert {n: leaf.shape for n, leaf in found.leaves.items()} == {n: v.shape for n, v in saved.values.items()}
    assert inspect_command([str(saved.folder)]) == 0
    said = capsys.readouterr().out
    assert "params.uneven.u13" in said and "13 x 6" in said and found.strategy in said and "threefry2x32" in said


@pytest.mark.parametrize("by", [store._hash_on_host, store._hash_on_devices])
def test_content_hash_does_not_depend_on_the_cut_and_sees_every_change(by, monkeypatch):
    """On NumPy's own arithmetic; a flipped bit, exchanged values and a shifted array all change it.

    CPUs hash on the host, accelerators on the devices; the blocks are made smaller than the pieces here.
    """
    monkeypatch.setattr(store, "_BLOCK", 5)

    def reference(x):
        words = x.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)).astype(np.uint32)
        h = words ^ (np.arange(words.size, dtype=np.uint32) * np.uint32(0x9E3779B1))
        h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
        return int((h ^ (h >> 16)).sum(dtype=np.uint32))

    hash_of = lambda x, shape: by({"x": x}, {"x": shape})()["x"]  # noqa: E731
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "uint32", "int8", "bool"):
        x = np.maximum(rng.normal(size=(6, 8)) * 9, 0).astype(jnp.dtype(dtype))
        seen = set()
        for mesh, spec in [("1x8", (None, "shard")), ("2x4", ("replica", "shard")), ("1x2", ("shard",)), ("1x4", ())]:
            there = jax.device_put(x, jax.NamedSharding(submesh(mesh), PartitionSpec(*spec)))
            seen.add(hash_of(there, x.shape))
        assert seen == {reference(x)}
        padded = jnp.pad(x, [(0, 2), (0, 0)])
        assert hash_of(padded, x.shape) == reference(x)
        flipped = x.copy()
        flipped.view(np.uint8)[3, 3] ^= 1
        for other in (flipped, x[::-1].copy(), np.roll(x, 1)):
            assert hash_of(jnp.asarray(other), x.shape) not in seen


# In the background


@pytest.mark.parametrize("setting", settings(1))
def test_background_save_sees_one_step(tmp_path, setting):
    """C-43: the state is donated to the next steps while it is being written and hashed; 20 times.

    The judge is a second run without saves: nothing else may look at the buffers of the first, for that would keep
    them from being written over.
    """
    plan, tx, step = make_step(setting)
    wanted, want = TrainState.abstract(tx, plan), {}

    def run(after_one):
        state = TrainState.create(plan.place(make_params()), tx, plan)
        for i in range(60):
            state, _ = step(state, make_batch(i))
            if i % 3 == 0:
                after_one(i + 1, state)

    with Checkpoints(tmp_path, newest=None) as checkpoints:
        run(lambda number, state: checkpoints.save(state))
    run(lambda number, state: want.update({number: values(state)}))
    assert checkpoints.steps() == list(want) and len(want) == 20
    for number, saved in want.items():
        assert bitwise_equal(values(restore(checkpoints.path(number), wanted)), saved)


# Damage


def rewrite(path, change):
    """Another checkpoint with the same arrays: its checksum is left out, as before there were any."""
    meta = json.loads((path / "jfsdp.json").read_text())
    change(meta)
    del meta["checksum"]
    (path / "jfsdp.json").write_text(json.dumps(meta))


def largest(path):
    files = [p for p in (path / "arrays").rglob("*") if p.is_file() and p.name != "zarr.json"]
    return max(files, key=lambda p: p.stat().st_size)


def cut_in_half(path):
    file = largest(path)
    os.truncate(file, file.stat().st_size // 2)
    return file.relative_to(path).as_posix()


def remove(path):
    file = largest(path)
    file.unlink()
    return file.relative_to(path).as_posix()


def remove_mark(path):
    (path / "jfsdp.json").unlink()
    return "jfsdp.json"


def cut_mark(path):
    os.truncate(path / "jfsdp.json", 100)
    return "jfsdp.json"


def change_mark(path):
    """A digit of what is plain text: another step, another place in the data, and all the rest in order."""
    text = (path / "jfsdp.json").read_text()
    changed = text.replace('"step": 3,', '"step": 4,')
    assert changed != text
    (path / "jfsdp.json").write_text(changed)
    return "jfsdp.json"


def flip(path):
    file = largest(path)
    content = bytearray(file.read_bytes())
    content[2] ^= 1
    file.write_bytes(content)
    return file.relative_to(path).as_posix()


def exchange(path):
    a, b = (path / "arrays" / f"opt_state.0.{m}.blocks.w" / "c" / "0" / "0" / "0" for m in ("mu", "nu"))
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    return "opt_state.0.mu.blocks.w"


@pytest.mark.parametrize("damage", [cut_in_half, remove, remove_mark, cut_mark, change_mark, flip, exchange])
def test_damage_is_an_error_by_name_and_a_fallback_for_automatic_resume(run, copy, caplog, damage):
    """C-46: restoring by name fails and names the file; the automatic choice falls back to step 2 with one warning,
    and its values are what was saved."""
    run_, path, wanted = copy
    rewrite(shutil.copytree(path, run_ / "step_00000002"), lambda meta: meta.update(step=2))
    named = damage(path)
    with pytest.raises(DamagedCheckpoint) as error:
        restore(path, wanted)
    assert named in str(error.value) and "Use another checkpoint" in str(error.value)
    with Checkpoints(run_) as checkpoints, caplog.at_level(logging.WARNING, "jfsdp"):
        state, _ = checkpoints.restore(wanted)
        (record,) = [r for r in caplog.records if r.name.startswith("jfsdp")]
        assert "going on from step 2" in record.message and named in record.message
        assert bitwise_equal(values(state), run.values)
        assert checkpoints.steps() == [2] and (run_ / "step_00000003.damaged").exists()


def test_no_good_checkpoint_is_an_error_and_no_fresh_start(copy):
    """C-46: never zeros, and never step 0 in place of what was lost."""
    run_, path, wanted = copy
    cut_in_half(path)
    with Checkpoints(run_) as checkpoints, pytest.raises(DamagedCheckpoint, match="has no good checkpoint"):
        checkpoints.restore(wanted)
    assert path.exists()  # nothing was renamed


def test_foreign_folder_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is no checkpoint of jfsdp and holds none"):
        open_checkpoint(tmp_path / "empty")
    with pytest.raises(ValueError, match="there is no such folder. Name a checkpoint, or the folder of a run"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "jfsdp.json").write_text('{"weights": 1}')
    with pytest.raises(DamagedCheckpoint, match="jfsdp.json cannot be understood: it was not written by jfsdp"):
        open_checkpoint(tmp_path)
    (tmp_path / "jfsdp.json").write_text('{"format": "jfsdp-checkpoint-2", "versions": {"jfsdp": "9"}}')
    with pytest.raises(DamagedCheckpoint, match="jfsdp-checkpoint-2 is of another version of jfsdp"):
        open_checkpoint(tmp_path)
    assert inspect_command([str(tmp_path)]) == 2
    assert "jfsdp inspect: error" in capsys.readouterr().err


# Another model


@pytest.mark.parametrize("sizes", [dict(layers=3), dict(layers=1), dict(width=12)], ids=str)
def test_checkpoint_of_another_model_is_refused_with_every_shape(run, sizes):
    """C-47: more layers, fewer layers, another width."""
    with pytest.raises(ValueError, match="does not fit") as error:
        plan = make_plan_on(run.setting.mesh, params=make_params(**sizes))
        restore(run.folder, TrainState.abstract(optimizer(moment(run.setting)), plan))
    there, here = make_params()["blocks"], make_params(**sizes)["blocks"]
    lines = [
        f"  {part}.blocks.{name} is {list(there[name].shape)} in the checkpoint, {list(here[name].shape)} here"
        for part in ("params", "opt_state.0.mu", "opt_state.0.nu")
        for name in sorted(here)
    ]
    assert str(error.value).splitlines()[1:-1] == lines
    assert "partial=True" in str(error.value) and not isinstance(error.value, DamagedCheckpoint)


def test_a_long_list_of_entries_is_cut_and_counted(run):
    plan = make_plan({f"w{i}": np.ones(8, np.float32) for i in range(30)}, submesh("1x8"))
    with pytest.raises(ValueError, match="not in the checkpoint\n  and 80 more like this\n") as error:  # 90 in all
        restore(run.folder, TrainState.abstract(optimizer(), plan))
    assert str(error.value).count("is not in the checkpoint") == 10


def test_missing_and_left_over_entries_are_listed_and_partial_loading_logs_them(run, caplog):
    """C-47: partial loading only when asked for."""
    params = make_params()
    params["extra"] = np.full((8,), 7, np.float32)
    del params["s"]
    plan, tx = make_plan_on(run.setting.mesh, params=params), optimizer(moment(run.setting))
    state = TrainState.create(plan.place(params), tx, plan)
    with pytest.raises(ValueError, match=r"params.extra \[8\] is not in the checkpoint") as error:
        restore(run.folder, state)
    assert "params.s [] is only in the checkpoint" in str(error.value)
    with caplog.at_level(logging.WARNING, "jfsdp"):
        got = restore(run.folder, state, partial=True)
    assert "left out" in caplog.text and "params.extra" in caplog.text and "params.s" in caplog.text
    assert np.asarray(got.params["extra"]).tolist() == [7.0] * 8
    assert bitwise_equal(values(got)["params.blocks.w"], run.values["params.blocks.w"])


def test_another_dtype_needs_an_option(run, caplog):
    """C-52: fp32 moments into a template with bf16 ones, and the other way round."""
    there = moment(run.setting)
    here_ = {"float32": "bfloat16", "bfloat16": "float32"}[there]
    wanted = TrainState.abstract(optimizer(here_), make_plan_on(run.setting.mesh))
    with pytest.raises(ValueError, match=f"opt_state.0.mu.s is {there} in the checkpoint, {here_} here") as error:
        restore(run.folder, wanted)
    assert "cast=True" in str(error.value)
    with caplog.at_level(logging.WARNING, "jfsdp"):
        state = restore(run.folder, wanted, cast=True)
    assert "dtypes converted" in caplog.text
    name = "opt_state.0.mu.uneven.u7"
    assert bitwise_equal(values(state)[name], run.values[name].astype(here_))


def test_another_random_generator_is_refused(copy):
    """C-31: JAX's settings, and the kind of the key itself (C-59)."""
    _, path, wanted = copy
    rewrite(path, lambda meta: meta["generator"].update(jax_threefry_partitionable=False))
    with pytest.raises(ValueError, match="saved with jax_threefry_partitionable False .here True.*JAX_THREEFRY_"):
        restore(path, wanted)


def test_another_kind_of_key_is_refused(run):
    """C-59: the key's type survives or the restore does not."""
    wanted = like(run.setting)
    other = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    key = jax.ShapeDtypeStruct((), other.dtype, sharding=wanted.key.sharding)
    with pytest.raises(ValueError, match="key: random keys of threefry2x32 in the checkpoint, of rbg here"):
        restore(run.folder, replace(wanted, key=key))


# Local


def test_local_checkpoint_restores_on_the_same_devices_only(tmp_path, run):
    wanted, (mesh, strategy) = like(run.setting), (run.setting.mesh, run.setting.strategy)
    with Checkpoints(tmp_path, kind="local") as checkpoints:
        checkpoints.save(restore(run.folder, wanted))
    assert bitwise_equal(values(restore(tmp_path, wanted)), run.values)
    other = {"1x8": ("2x4", "HYBRID_SHARD"), "2x4": ("1x8", "FULL_SHARD")}[mesh]
    for place in (other, (mesh, "NO_SHARD")):
        there, here_ = (f"mesh {m}, {s}, 1 process" for m, s in ((mesh, strategy), place))
        with pytest.raises(ValueError, match=f"of {there}, and this run has {here_}"):
            restore(tmp_path, like(run.setting, *place))
    file = tmp_path / "step_00000003" / "local" / "process_00000.json"
    table = file.read_text()
    file.write_text(table.replace("0", "1", 1))
    with pytest.raises(DamagedCheckpoint, match="local/process_00000.json is not what was written"):
        restore(tmp_path, wanted)
    file.write_text(table)
    file = file.with_suffix(".bin")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="content hash"):
        restore(tmp_path, wanted)


# Consolidated


@pytest.mark.parametrize(
    ("mesh", "strategy"), [("1x8", s) for s in PLAIN] + [("2x4", s) for s in (*PLAIN, *HYBRID)], ids=str
)
def test_consolidated_set_has_logical_shapes_and_is_read_without_jfsdp(tmp_path, run, mesh, strategy):
    """C-48, C-04: every tensor as it was, from devices and from a checkpoint; back onto another mesh."""
    from safetensors.numpy import load_file

    state = restore(run.folder, like(run.setting, mesh, strategy))
    save_consolidated(tmp_path / "a", state.params, state.plan)
    consolidate(run.folder, tmp_path / "b")
    want = {n.removeprefix("params."): v for n, v in run.values.items() if n.startswith("params.")}
    for folder in ("a", "b"):
        assert bitwise_equal(load_file(tmp_path / folder / "model.safetensors"), want)
    assert sum(v.size for v in want.values()) == state.plan.num_params
    other = make_plan_on("1x4")
    again = other.unpad(load_consolidated(tmp_path / "a", other))
    assert bitwise_equal(again, {k: want_tree(want, k) for k in again})


def want_tree(flat, name):
    inside = {n.removeprefix(f"{name}."): v for n, v in flat.items() if n.startswith(f"{name}.")}
    return inside or flat[name]


@pytest.mark.parametrize("setting", settings(4))
def test_tied_parameters_are_written_once_with_their_alias(tmp_path, setting):
    """C-49: one name in the index's files, the other recorded."""
    mesh, dtype = setting.mesh, setting.policy.param_dtype
    params = {"embed": jnp.ones((10, 4), dtype), "w": jnp.ones((4, 4), dtype)}
    plan = make_plan(params, submesh(mesh))
    save_consolidated(tmp_path, plan.place(params), plan, aliases={"head": "embed"})
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == {"embed", "w"} and file.metadata()["head"] == "embed"
    with pytest.raises(ValueError, match="does not fit"):
        load_consolidated(tmp_path, make_plan({"w": params["w"]}, submesh(mesh)))


def test_checkpoint_reads_one_array_at_a_time_by_name(run):
    found = open_checkpoint(run.folder)
    part = found.read("params.uneven.u17", (slice(3, 9), slice(2, 5)))
    assert np.array_equal(part, run.values["params.uneven.u17"][3:9, 2:5])
    with pytest.raises(KeyError, match="has no params.none. It has step"):
        found.read("params.none")
