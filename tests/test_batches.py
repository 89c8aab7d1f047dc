"""`jfsdp.sampler` and `jfsdp.batches`: the order of examples holds whatever the devices, stops and workers."""

import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from jfsdp.batches import Batches, check_batch, evaluation_batches
from jfsdp.data import Packed, load
from jfsdp.sampler import _permutation, mix


def packed(ids, seq_len):
    """Rows of a stream of ids below 10."""
    return Packed(name="ids", stream=np.asarray(ids), start=0, stop=len(ids), seq_len=seq_len, vocab_size=10)


class Numbers:
    """Examples 0 to n-1 that carry their number as a metric; `reads` notes which were asked for."""

    def __init__(self, n):
        self.n, self.reads = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads.append(i)
        return {"id": np.int32(i), "weights": np.float32(1), "segments": np.int32(1)}


def numbers_in(batch):
    """Example numbers of a batch, padding left out."""
    return [int(i) for i, weight in zip(batch["id"], batch["weights"], strict=True) if weight]


def on_processes(count, batches, examples, **options):
    """The batches of `examples` numbers as each process sees them."""
    return [batches(Numbers(examples), process_index=p, process_count=count, **options) for p in range(count)]


def take(batches, count):
    return [numbers_in(next(batches)) for _ in range(count)]


# Order


def test_each_epoch_has_every_example_once_and_its_own_order():
    batches = Batches(Numbers(24), global_batch=4, seed=3)
    epochs = [sum(take(batches, 6), []) for _ in range(3)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_follows_the_seed_and_nothing_else():
    first, second, other = (take(Batches(Numbers(24), global_batch=4, seed=s), 9) for s in (3, 3, 4))
    assert first == second and first != other


def test_shuffled_order_is_the_same_in_every_numpy():
    """Written down once: a run resumed after an upgrade must find its order again."""
    assert _permutation(10, 5, 2).tolist() == [3, 5, 9, 2, 7, 1, 8, 0, 6, 4]


def test_without_shuffle_examples_come_in_order():
    batches = Batches(Numbers(6), global_batch=3, shuffle=False)
    assert take(batches, 3) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stop", [3, 5, 6, 7], ids=lambda n: f"after_{n}")
def test_c56_order_continues_after_a_stop(stop, drop_last):
    """C-56: 23 examples, batch 4; a stop inside epoch 1 and after its last batch, 2 epochs in all."""
    options = dict(global_batch=4, seed=1, drop_last=drop_last)
    whole = take(Batches(Numbers(23), **options), 12)
    before = Batches(Numbers(23), **options)
    head = take(before, stop)
    state = json.loads(json.dumps(before.state()))  # what a checkpoint makes of it
    after = Batches(Numbers(23), **options)
    after.restore(state)
    assert head + take(after, 12 - stop) == whole
    epoch = before.order.batches_per_epoch
    assert len(set(sum(whole[:epoch], []))) == (20 if drop_last else 23)
    assert whole[:epoch] != whole[epoch : 2 * epoch]


def test_c56_going_on_reads_only_what_is_handed_out():
    examples = Numbers(23)
    batches = Batches(examples, global_batch=4, seed=1)
    batches.start_at(1_000_003)
    assert examples.reads == [] and batches.epoch == 1_000_003 // 6
    next(batches)
    assert len(examples.reads) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_c56_order_of_a_grain_dataset_continues(workers):
    """Grain reads and transforms, also in worker processes; the order is that of any other examples."""
    grain = pytest.importorskip("grain")
    doubled = grain.MapDataset.source(range(23)).map(_doubled)
    options = dict(global_batch=4, seed=1)
    before = Batches(doubled, **options)
    head = take(before, 5)
    after = Batches(doubled, workers=workers, **options)
    after.restore(json.loads(json.dumps(before.state())))
    tail = take(after, 7)
    after.close()
    want = take(Batches(Numbers(23), **options), 12)
    assert head + tail == [[2 * i for i in batch] for batch in want]


def _doubled(i):
    return {"id": np.int32(2 * i), "weights": np.float32(1)}


def test_c58_order_is_that_of_global_batches_on_fewer_processes():
    saved = Batches(Numbers(64), global_batch=16, seed=2, process_index=1, process_count=2)
    take(saved, 3)
    resumed = Batches(Numbers(64), global_batch=16, seed=2)
    resumed.restore(saved.state())
    expected = Batches(Numbers(64), global_batch=16, seed=2)
    take(expected, 3)
    assert take(resumed, 4) == take(expected, 4)


@pytest.mark.parametrize(
    "change, saved, here",
    [
        (dict(global_batch=8), "global_batch 16", "global_batch 8"),
        (dict(seed=7), "seed 0", "seed 7"),
        (dict(shuffle=False), "shuffle 1", "shuffle 0"),
        (dict(drop_last=True), "drop_last 0", "drop_last 1"),
        (dict(examples=65), "examples 64", "examples 65"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_c58_another_order_is_refused_with_both_numbers(change, saved, here):
    state = Batches(Numbers(64), global_batch=16).state()
    options = {"examples": 64, "global_batch": 16, **change}
    batches = Batches(Numbers(options.pop("examples")), **options)
    with pytest.raises(ValueError, match=f"saved with {saved}; this run has {here}. Keep .*accumulation"):
        batches.restore(state)
    assert batches.step == 0


def test_c58_other_contents_are_refused_and_the_same_elsewhere_go_on():
    """As many rows of another file; of one that has moved; in a mixture; and what no digest is known of."""
    ids = np.arange(41) % 9
    rows, other = packed(ids, 4), packed(ids[::-1], 4)
    state = json.loads(json.dumps(Batches(rows, global_batch=2).state()))
    moved = Packed(**{**vars(packed(ids.astype(np.uint16), 4)), "name": "moved"})
    Batches(moved, global_batch=2).restore({**state, "step": 3})
    with pytest.raises(ValueError, match=f"learned from ids, and ids has as many .* instead of {rows.digest}.*Keep"):
        Batches(other, global_batch=2).restore(state)
    mixed = json.loads(json.dumps(Batches(mix([rows, moved], [1, 2]), global_batch=2).state()))
    Batches(mix([moved, rows], [1, 2]), global_batch=2).restore(mixed)
    with pytest.raises(ValueError, match=r"learned from ids \+ moved, and ids \+ ids has"):
        Batches(mix([rows, other], [1, 2]), global_batch=2).restore(mixed)
    Batches(other, global_batch=2).restore({name: state[name] for name in state if name != "digest"})
    Batches(Numbers(10), global_batch=2).restore(state)


@pytest.mark.parametrize("step, error", [(-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_position_that_counts_no_batches_is_refused(step, error):
    with pytest.raises(error, match="step is .* it counts the batches handed out. Use .*0 or more"):
        Batches(Numbers(8), global_batch=4).start_at(step)


# Mixtures


def mixed_batches(**options):
    return Batches(mix([Numbers(7), Numbers(50)], [0.75, 0.25]), global_batch=8, **options)


def test_mixture_has_exact_shares_and_goes_through_each_source_at_its_own_pace():
    """Of every four examples in a row three are of the first source, which comes round and round, each example once."""
    order = mixed_batches(seed=1).order
    ids = np.concatenate([order.batch(step) for step in range(40)])
    assert all((window < 7).sum() == 3 for window in ids.reshape(-1, 4))
    first, second = ids[ids < 7], ids[ids >= 7] - 7
    rounds = first[: len(first) // 7 * 7].reshape(-1, 7)
    assert (np.sort(rounds) == np.arange(7)).all() and len({tuple(r) for r in rounds}) > 5
    assert sorted(second[:50]) == list(range(50)) and second[:50].tolist() != list(range(50))
    assert not np.array_equal(ids, np.concatenate([mixed_batches(seed=2).order.batch(step) for step in range(40)]))


@pytest.mark.parametrize("stop", [1, 5, 13])
def test_mixture_goes_on_where_it_stopped_on_any_number_of_processes(stop):
    """C-56, C-63: the order is a function of seed and step."""
    whole = mixed_batches(seed=3)
    want = [next(whole)["id"].tolist() for _ in range(20)]
    before = mixed_batches(seed=3)
    head = [next(before)["id"].tolist() for _ in range(stop)]
    parts = [mixed_batches(seed=3, process_index=p, process_count=2) for p in (0, 1)]
    for part in parts:
        part.restore(json.loads(json.dumps(before.state())))
    tail = [next(parts[0])["id"].tolist() + next(parts[1])["id"].tolist() for _ in range(20 - stop)]
    assert head + tail == want


def test_mixture_of_other_sources_or_weights_is_refused():
    state = mixed_batches().state()
    other = Batches(mix([Numbers(7), Numbers(50)], [1, 1]), global_batch=8)
    with pytest.raises(ValueError, match=r"saved with weights \[3, 1\]; this run has weights \[1, 1\]"):
        other.restore(state)
    with pytest.raises(ValueError, match="saved with sizes None, weights None; this run has"):
        other.restore(Batches(Numbers(57), global_batch=8).state())
    with pytest.raises(ValueError, match=r"weights of a mixture are \[1, 0\]. Give each source one of 0.001"):
        mix([Numbers(7), Numbers(50)], [1, 0])
    with pytest.raises(ValueError, match="come out only every .* examples. Use rounder ones"):
        mix([Numbers(7), Numbers(50)], [0.997, 991.003])
    with pytest.raises(ValueError, match="a mixture is shuffled and has no last batch"):
        Batches(mix([Numbers(7)], [1]), global_batch=4, drop_last=True)


def test_mixture_of_files_says_what_is_in_it():
    parts = [packed(np.arange(60) % 10, 4), packed(np.arange(90) % 10, 4)]
    mixture = mix(parts, [1, 3])
    assert len(mixture) == 15 + 23 and np.array_equal(mixture[15]["tokens"], parts[1][0]["tokens"])
    assert str(mixture).startswith("0.25 of ") and "; 0.75 of " in str(mixture)
    with pytest.raises(IndexError, match="has 38 examples"):
        mixture[38]


# Worker processes


def test_worker_processes_change_nothing(tmp_path):
    """The same batches in the same order, also after a jump; what is mapped is mapped again, not copied."""
    np.save(tmp_path / "ids.npy", np.arange(900) % 10)
    rows = load(tmp_path / "ids.npy", seq_len=4, vocab_size=10, held_out=0)[0]
    assert isinstance(pickle.loads(pickle.dumps(rows)).stream, np.memmap) and len(pickle.dumps(rows)) < 2000
    alone, helped = Batches(rows, global_batch=8, seed=1), Batches(rows, global_batch=8, seed=1, workers=2)
    try:
        for start in (0, 17):
            alone.start_at(start)
            helped.start_at(start)
            for _ in range(3):
                want, got = next(alone), next(helped)
                assert all(np.array_equal(want[name], got[name]) for name in want)
            assert helped.state() == alone.state()
    finally:
        helped.close()


def test_worker_that_is_ended_from_outside_costs_no_batch(caplog):
    """By the system, for want of memory, or by a scheduler's SIGTERM to all; twice in a row is an error."""
    rows = packed(np.arange(900) % 10, 4)
    alone, helped = Batches(rows, global_batch=8), Batches(rows, global_batch=8, workers=1)
    try:
        for batch in range(4):
            if batch == 2:
                (worker,) = helped._pool._processes.values()
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
            with caplog.at_level(logging.WARNING, "jfsdp"):
                assert np.array_equal(next(alone)["tokens"], next(helped)["tokens"])
        (record,) = caplog.records
        assert "ended from outside; 1 are started anew" in record.message
        helped._from_workers = lambda: (_ for _ in ()).throw(BrokenProcessPool())
        with pytest.raises(ValueError, match="ended from outside twice, perhaps for want of memory. Use fewer workers"):
            next(helped)
    finally:
        helped.close()


def test_workers_end_with_a_run_that_is_killed():
    script = """if __name__ == "__main__":
        import os
        from tests.test_batches import Batches, np, packed
        batches = Batches(packed(np.arange(900) % 10, 4), global_batch=8, workers=1)
        next(batches)
        print(*batches._pool._processes, flush=True)
        os._exit(1)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True, timeout=60
    )
    (worker,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


# Batches


def test_batch_stacks_the_rows_of_the_dataset():
    rows = packed(np.arange(30) % 10, 4)
    batch = next(Batches(rows, global_batch=3, shuffle=False))
    for name, values in batch.items():
        assert values.dtype == rows[0][name].dtype
        assert np.array_equal(values, np.stack([rows[i][name] for i in range(3)]))


def test_c61_last_partial_batch_is_padded_and_counts_its_5_examples():
    """C-61: 21 examples of losses 1 to 21, batch 8, 2 processes: the third batch has the mean of 17 to 21."""
    parts = on_processes(2, Batches, 21, global_batch=8, shuffle=False)
    for part in parts:
        take(part, 2)
    third = [next(part) for part in parts]
    loss = np.concatenate([part["id"] + 1 for part in third])
    weights = np.concatenate([part["weights"] for part in third])
    assert (loss * weights).sum() / weights.sum() == 19 and weights.sum() == 5
    assert np.concatenate([part["segments"] for part in third]).tolist() == [1] * 5 + [0] * 3
    assert take(parts[0], 1) == [[0, 1, 2, 3]]  # the next epoch begins with a whole batch


def test_c61_dropping_on_request_names_the_5_dropped_examples(caplog):
    parts = on_processes(2, Batches, 21, global_batch=8, drop_last=True)
    seen = sum((take(part, 2) for part in parts), [])
    missing = sorted(set(range(21)) - set(sum(seen, [])))
    assert parts[0].order.batches_per_epoch == 2 and len(missing) == 5
    assert sorted(parts[0].order.dropped(0)) == missing
    (record,) = caplog.records  # of one process
    said, listed = record.getMessage().split(": ", 2)[1:]
    assert said == "drop_last left out 5 examples" and sorted(json.loads(listed)) == missing


def test_c77_every_batch_of_every_epoch_has_one_shape():
    batches = Batches(packed(np.arange(64) % 10, 3), global_batch=8)
    assert len(batches.order.batch(0)) == 8 and batches.order.examples == 21
    shapes = {tuple((name, x.shape, x.dtype) for name, x in next(batches).items()) for _ in range(9)}
    assert len(shapes) == 1


@pytest.mark.parametrize("global_batch, batches", [(8, 2), (16, 1)])
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_c62_evaluation_counts_every_example_once(global_batch, batches, processes):
    """C-62: metric values 0 to 8. C-71: every process has as many batches, also one that has padding only."""
    parts = [list(part) for part in on_processes(processes, evaluation_batches, 9, global_batch=global_batch)]
    assert {len(part) for part in parts} == {batches}
    assert {batch["id"].shape for part in parts for batch in part} == {(global_batch // processes,)}
    metric = sum((batch["id"] * batch["weights"]).sum() for part in parts for batch in part)
    count = sum(batch["weights"].sum() for part in parts for batch in part)
    assert (metric / count, count) == (4, 9)


def test_evaluation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="0 evaluation examples, .* Hold out more or do not evaluate"):
        evaluation_batches(Numbers(0), global_batch=8)


def test_c63_each_process_reads_its_own_part_of_the_same_order():
    """C-63: 2 processes, 32 examples, global batch 8, one epoch."""
    examples = [Numbers(32), Numbers(32)]
    parts = [Batches(examples[p], global_batch=8, seed=5, process_index=p, process_count=2) for p in (0, 1)]
    together = [a + b for a, b in zip(*(take(part, 4) for part in parts), strict=True)]
    assert all(len(set(batch)) == 8 for batch in together)
    assert together == take(Batches(Numbers(32), global_batch=8, seed=5), 4)
    assert sorted(sum(together, [])) == list(range(32))
    assert len(examples[0].reads) == 16 and not set(examples[0].reads) & set(examples[1].reads)


def test_data_smaller_than_a_global_batch_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="5 examples, .* global batch of 8. .* a global batch of at most 5"):
        Batches(Numbers(5), global_batch=8)


def test_batch_that_processes_cannot_share_is_refused():
    for batches in (Batches, evaluation_batches):
        with pytest.raises(ValueError, match="10 does not split equally over 4 processes. Use 8 or 12"):
            batches(Numbers(50), global_batch=10, process_count=4)


def test_process_beyond_the_count_is_refused():
    with pytest.raises(ValueError, match=r"process_index is 2 of 2 processes. Use jax.process_index\(\)"):
        Batches(Numbers(50), global_batch=10, process_index=2, process_count=2)


# Batch size


def test_batch_size_is_shared_by_devices_and_micro_batches():
    assert check_batch(16, devices=8) == 2
    assert check_batch(32, devices=4, accumulate=2) == 4


@pytest.mark.parametrize(
    "batch_size, devices, accumulate, message",
    [
        (10, 8, 1, "10 does not split equally over 8 devices x 1 micro-batches = 8. Use 8 or 16."),
        (50, 8, 3, "50 does not split equally over 8 devices x 3 micro-batches = 24. Use 48 or 72."),
        (5, 4, 2, "5 does not split equally over 4 devices x 2 micro-batches = 8. Use 8."),
    ],
)
def test_c60_indivisible_batch_is_refused_with_the_nearest_sizes(batch_size, devices, accumulate, message):
    with pytest.raises(ValueError, match=re.escape(f"batch_size {message}")):
        check_batch(batch_size, devices=devices, accumulate=accumulate)


@pytest.mark.parametrize("name", ["batch_size", "devices", "accumulate"])
@pytest.mark.parametrize("value, error", [(0, ValueError), (True, TypeError), (2.0, TypeError)])
def test_sizes_are_counts(name, value, error):
    sizes = {"batch_size": 8, "devices": 2, "accumulate": 1, name: value}
    with pytest.raises(error, match=f"{name} is {value}.*1 or more"):
        check_batch(sizes.pop("batch_size"), **sizes)


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed is -1: .* Use 0 or more"):
        Batches(Numbers(8), global_batch=4, seed=-1)
