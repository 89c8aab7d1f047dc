"""`jfsdp.data`: what is read, how it is packed, and that the order of examples holds whatever the devices.

Small sources written here; the only larger one is the built-in text. No JAX: the data does not need it.
"""

import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

from jfsdp import data
from jfsdp.data import END_OF_TEXT, Batches, check_batch, evaluation_batches, load

END = 9


def ids_file(folder, ids, name="ids.npy"):
    np.save(folder / name, np.asarray(ids))
    return folder / name


def packed(folder, ids, seq_len, **options):
    """The training rows of a file of ids, nothing held out."""
    return load(ids_file(folder, ids), seq_len=seq_len, held_out=0, **{"vocab_size": 10, **options})[0]


def texts(rows):
    """The documents of packed byte tokens."""
    return bytes(rows.stream[rows.start : rows.stop]).split(bytes([END_OF_TEXT]))[:-1]


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


# Packing


def test_row_follows_the_picture_in_the_note(tmp_path):
    row = packed(tmp_path, [1, 2, 3, END, 4, 5, 6], 6, end_of_document=END)[0]
    assert row["tokens"].tolist() == [1, 2, 3, END, 4, 5]
    assert row["targets"].tolist() == [2, 3, END, 4, 5, 6]
    assert row["weights"].tolist() == [1, 1, 1, 0, 1, 1]
    assert row["segments"].tolist() == [1, 1, 1, 1, 2, 2]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1]


def test_rows_have_the_promised_dtypes_and_one_shape(tmp_path):
    for row in packed(tmp_path, np.arange(9) % 7, 3):
        assert {name for name, values in row.items() if values.dtype == np.int32} == {
            "tokens", "targets", "segments", "positions"
        }  # fmt: skip
        assert row["weights"].dtype == np.float32
        assert all(values.shape == (3,) for values in row.values())


def test_every_token_but_the_first_is_a_target_once(tmp_path):
    stream = np.random.default_rng(0).integers(1, 9, 50)
    rows = packed(tmp_path, stream, 7)
    assert len(rows) == 7
    assert np.concatenate([row["tokens"] for row in rows])[:49].tolist() == stream[:-1].tolist()
    assert np.concatenate([row["targets"] for row in rows]).tolist() == stream[1:].tolist()


def test_last_row_is_padded_with_weight_and_segment_0(tmp_path):
    row = packed(tmp_path, [1, 2, 3, 4, 5, 6, 7], 4)[1]
    assert row["tokens"].tolist() == [5, 6, 0, 0]
    assert row["targets"].tolist() == [6, 7, 0, 0]
    assert row["weights"].tolist() == [1, 1, 0, 0]
    assert row["segments"].tolist() == [1, 1, 0, 0]


def test_long_document_goes_on_in_the_next_row_as_a_new_segment(tmp_path):
    first, second = packed(tmp_path, [1, END, 2, 3, 4, 5, END], 3, end_of_document=END)
    assert first["segments"].tolist() == [1, 1, 2] and first["positions"].tolist() == [0, 1, 0]
    assert second["segments"].tolist() == [1, 1, 1] and second["positions"].tolist() == [0, 1, 2]
    assert second["weights"].tolist() == [1, 1, 1]  # 5 -> END is counted


def test_row_that_begins_after_an_end_knows_nothing_of_the_document_before(tmp_path):
    second = packed(tmp_path, [1, 2, END, 3, 4, 5, 6], 3, end_of_document=END)[1]
    assert second["segments"].tolist() == [1, 1, 1] and second["positions"].tolist() == [0, 1, 2]


def test_end_of_document_goes_unseen_where_none_is_named(tmp_path):
    row = packed(tmp_path, [1, END, 2, 3], 3)[0]
    assert row["weights"].tolist() == [1, 1, 1] and row["segments"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("i", [-1, 2])
def test_example_outside_the_rows_is_an_index_error(tmp_path, i):
    with pytest.raises(IndexError, match=f"examples 0 to 1; there is no example {i}"):
        packed(tmp_path, [1, 2, 3, 4, 5], 2)[i]


@pytest.mark.parametrize("seq_len", [1, 0, -4])
def test_c12_sequence_length_below_2_is_refused(seq_len):
    with pytest.raises(ValueError, match=rf"seq_len is {seq_len}: .* single token. Use 2 or more"):
        load(None, seq_len=seq_len, vocab_size=256)


@pytest.mark.parametrize("seq_len", [True, 8.0, "8"])
def test_sequence_length_of_another_type_is_refused(seq_len):
    with pytest.raises(TypeError, match="seq_len is .*, not an int.*Use an int of 2 or more"):
        load(None, seq_len=seq_len, vocab_size=256)


# Sources of text


def test_built_in_text_is_python_source_and_the_same_every_time():
    train, evaluation = load(None, seq_len=512, vocab_size=data.BYTE_VOCAB)
    again, _ = load(None, seq_len=512, vocab_size=data.BYTE_VOCAB)
    assert np.array_equal(train.stream, again.stream) and train.stop == again.stop
    assert train.num_tokens > 3_000_000
    assert 0.02 < evaluation.num_tokens / train.num_tokens < 0.10
    assert any(b"def loads(" in text for text in texts(train))
    assert not set(texts(train)) & {text for text in texts(evaluation) if len(text) > 1000}  # by file


def test_built_in_text_leaves_out_installed_packages_and_stops_at_its_limit(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    for name, size in {"site-packages/a.py": 1, "x.py": 10, "y.py": 10, "z.py": 10}.items():
        (tmp_path / name).write_text("x" * size)
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: tmp_path)
    monkeypatch.setattr(data, "_BUILT_IN_BYTES", 25)
    train, _ = load(None, seq_len=4, vocab_size=256, held_out=0)
    assert texts(train) == [b"x" * 10, b"x" * 10]


def test_python_without_its_sources_asks_for_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: tmp_path)
    with pytest.raises(ValueError, match="no .py files.*Name a file of text"):
        load(None, seq_len=4, vocab_size=256)


def test_text_file_is_one_document_of_utf8_bytes_with_its_tail_held_out(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("né" * 40, encoding="utf-8")
    train, evaluation = load(file, seq_len=4, vocab_size=256, held_out=0.25)
    assert (train.num_tokens, evaluation.num_tokens) == (91, 30)
    assert bytes(train.stream) == ("né" * 40).encode() + b"\xff"
    assert train[0]["tokens"].tolist() == list("né".encode()) + [ord("n")]
    assert evaluation[len(evaluation) - 1]["targets"].max() == END_OF_TEXT


def test_folder_is_read_in_order_of_paths_and_says_what_it_skipped(tmp_path):
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    for name, content in {"b.md": b"second", "a.txt": b"first", "sub/c.JSON": b"third"}.items():
        (tmp_path / name).write_bytes(content)
    for name in ("sub/d.png", "Makefile", "sub/.git/e.txt", ".hidden.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "broken_link.md").symlink_to(tmp_path / "nowhere")
    train, _ = load(tmp_path, seq_len=4, vocab_size=256, held_out=0)
    assert texts(train) == [b"first", b"second", b"third"]
    counts = "1 .md, 1 .png, 1 empty documents, 2 hidden, 1 not UTF-8, 1 without suffix"
    assert str(train) == f"{tmp_path} (training): 19 tokens in 5 rows of 4; skipped {counts}"
    assert train.skipped[".png"] == 1


def test_held_out_documents_are_whole_and_evenly_spread(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"text {i:02}")
    train, evaluation = load(tmp_path, seq_len=4, vocab_size=256, held_out=0.1)
    assert texts(evaluation) == [b"text 09", b"text 19", b"text 29", b"text 39"]
    assert len(texts(train)) == 36 and not set(texts(train)) & set(texts(evaluation))


def test_too_few_documents_to_spare_one_hold_out_the_tail(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("x" * 99)
    train, evaluation = load(tmp_path, seq_len=4, vocab_size=256, held_out=0.1)
    assert (train.num_tokens, evaluation.num_tokens) == (270, 30)


def test_jsonl_records_are_documents_and_empty_ones_are_counted(tmp_path):
    lines = [{"text": "one"}, {"text": ""}, {"text": "twö", "id": 3}]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([*map(json.dumps, lines), " ", '{"text": "three"}']) + "\n")
    train, _ = load(file, seq_len=4, vocab_size=256, held_out=0)
    assert texts(train) == [b"one", "twö".encode(), b"three"]
    assert train.skipped == {"empty documents": 2}


@pytest.mark.parametrize(
    "line",
    ['{"text": "cut off', '{"content": "x"}', '{"text": 5}', '["text"]', "null", r'{"text": "\ud800"}'],
    ids=["malformed", "other_key", "number", "list", "null", "lone_surrogate"],
)
def test_bad_jsonl_record_is_reported_by_file_and_line(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{file}, line 3: ") + ".*Mend or delete that line"):
        load(file, seq_len=4, vocab_size=256)


def test_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="byte 0xff at position 3. Convert it to UTF-8; token ids belong in"):
        load(file, seq_len=4, vocab_size=256)


@pytest.mark.parametrize("name", ["none.txt", "none", "none.npy", "none.bin"])
def test_missing_source_lists_what_can_be_given(tmp_path, name):
    with pytest.raises(ValueError, match="no such file or folder. Give a text file, .* the built-in text"):
        load(tmp_path / name, seq_len=4, vocab_size=256)


def test_text_needs_a_vocabulary_of_all_bytes():
    with pytest.raises(ValueError, match="vocab_size is 255. Set vocab_size to 256 or more"):
        load(None, seq_len=8, vocab_size=255)


@pytest.mark.parametrize("end", [-1, 10])
def test_end_of_document_outside_the_vocabulary_is_refused(tmp_path, end):
    with pytest.raises(ValueError, match=f"end_of_document is {end}, .* vocabulary of 10. Give the id that"):
        packed(tmp_path, np.ones(20, int), 4, end_of_document=end)


def test_text_refuses_another_end_of_document():
    with pytest.raises(ValueError, match="end_of_document is 0, .* end with 255. Leave it out"):
        load(None, seq_len=8, vocab_size=256, end_of_document=0)


# Sources of token ids


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint64", ">u4"])
def test_npy_of_any_integer_dtype_is_mapped_not_loaded(tmp_path, dtype):
    train, evaluation = load(
        ids_file(tmp_path, np.arange(100).astype(dtype)), seq_len=4, vocab_size=100, held_out=0.2
    )
    assert isinstance(train.stream, np.memmap) and train.stream is evaluation.stream
    assert (train.num_tokens, evaluation.num_tokens) == (80, 20)
    assert evaluation[0]["tokens"].tolist() == [80, 81, 82, 83]
    assert train[len(train) - 1]["targets"].max() == 79  # the held-out part is not a target either


@pytest.mark.parametrize("name, dtype", [("a.bin", "<u2"), ("a.uint32.bin", "<u4")])
def test_bin_has_the_dtype_that_its_name_says(tmp_path, name, dtype):
    np.arange(1000, 1100).astype(dtype).tofile(tmp_path / name)
    train, _ = load(tmp_path / name, seq_len=4, vocab_size=2000, held_out=0)
    assert isinstance(train.stream, np.memmap)
    assert train[0]["tokens"].tolist() == [1000, 1001, 1002, 1003] and train.num_tokens == 100


def test_uint32_under_a_uint16_name_is_noticed(tmp_path):
    np.arange(100).astype("<u4").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="every second uint16 is 0, .* Rename it to a.uint32.bin"):
        load(tmp_path / "a.bin", seq_len=4, vocab_size=2000)


def test_bin_of_a_broken_length_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"12345")
    with pytest.raises(ValueError, match="5 bytes, .* no whole number of uint16 ids. Write little-endian"):
        load(tmp_path / "a.bin", seq_len=4, vocab_size=2000)


@pytest.mark.parametrize("ids", [np.ones(20), np.ones((4, 5), int), np.array(3)], ids=["float", "2d", "0d"])
def test_npy_that_is_not_a_row_of_integers_is_refused(tmp_path, ids):
    with pytest.raises(ValueError, match=r"integers in one dim.* Save ids.reshape\(-1\) in an integer dtype"):
        load(ids_file(tmp_path, ids), seq_len=4, vocab_size=10)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 an archive"], ids=["empty", "text", "npz"])
def test_file_named_npy_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match="is not a .npy file of numbers .* Write it with np.save"):
        load(tmp_path / "a.npy", seq_len=4, vocab_size=10)


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_id_outside_the_vocabulary_is_found_at_the_start(tmp_path, bad):
    ids = np.ones(50, np.int64)
    ids[33] = bad
    with pytest.raises(ValueError, match=f"id {bad} at position 33 .* vocabulary of 10 .* Train with the"):
        packed(tmp_path, ids, 4)


def test_id_outside_the_vocabulary_never_passes_in_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_CHECKED_AT_START", 0)  # as in the part of a large file beyond it
    ids = np.ones(50, np.int64)
    ids[32] = 2**32 + 1  # int32 would make it a harmless 1
    rows = packed(tmp_path, ids, 4)
    rows[6]
    for i in (7, 8):  # last target of row 7, first token of row 8
        with pytest.raises(ValueError, match=f"token id {2**32 + 1} at position 32 is outside"):
            rows[i]


@pytest.mark.parametrize("count", [0, 8])
@pytest.mark.parametrize("name", ["a.bin", "a.npy", "a.txt"])
def test_too_short_data_is_refused_with_both_token_counts(tmp_path, name, count):
    if name == "a.txt":
        (tmp_path / name).write_text("x" * (count - 1))  # the end of the document is a token too
    elif name == "a.bin":
        np.ones(count, "<u2").tofile(tmp_path / name)
    else:
        np.save(tmp_path / name, np.ones(count, int))
    with pytest.raises(ValueError, match=f"{name}.* has {count} tokens.* needs 9, .* Give more data"):
        load(tmp_path / name, seq_len=8, vocab_size=256, held_out=0)


def test_too_short_evaluation_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\(evaluation\) has 5 tokens; .* needs 9, .* another held_out"):
        load(ids_file(tmp_path, np.ones(100, int)), seq_len=8, vocab_size=10)


def test_folder_without_text_says_what_it_skipped(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ValueError, match="has 0 tokens; skipped 1 .parquet; .* Give more data"):
        load(tmp_path, seq_len=8, vocab_size=256)


@pytest.mark.parametrize("held_out", [-0.1, 1, 5])
def test_held_out_beyond_a_fraction_is_refused(held_out):
    with pytest.raises(ValueError, match=rf"held_out is {held_out}, .* Use 0 \(none\) to below 1"):
        load(None, seq_len=8, vocab_size=256, held_out=held_out)


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
    assert data._permutation(10, 5, 2).tolist() == [3, 5, 9, 2, 7, 1, 8, 0, 6, 4]


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


@pytest.mark.parametrize("step, error", [(-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_position_that_counts_no_batches_is_refused(step, error):
    with pytest.raises(error, match="step is .* it counts the batches handed out. Use .*0 or more"):
        Batches(Numbers(8), global_batch=4).start_at(step)


# Mixtures


def mixed_batches(**options):
    return Batches(data.mix([Numbers(7), Numbers(50)], [0.75, 0.25]), global_batch=8, **options)


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
    other = Batches(data.mix([Numbers(7), Numbers(50)], [1, 1]), global_batch=8)
    with pytest.raises(ValueError, match=r"saved with weights \[3, 1\]; this run has weights \[1, 1\]"):
        other.restore(state)
    with pytest.raises(ValueError, match="saved with sizes None, weights None; this run has"):
        other.restore(Batches(Numbers(57), global_batch=8).state())
    with pytest.raises(ValueError, match=r"weights of a mixture are \[1, 0\]. Give each source one of 0.001"):
        data.mix([Numbers(7), Numbers(50)], [1, 0])
    with pytest.raises(ValueError, match="come out only every .* examples. Use rounder ones"):
        data.mix([Numbers(7), Numbers(50)], [0.997, 991.003])
    with pytest.raises(ValueError, match="a mixture is shuffled and has no last batch"):
        Batches(data.mix([Numbers(7)], [1]), global_batch=4, drop_last=True)


def test_mixture_of_files_says_what_is_in_it(tmp_path):
    parts = [packed(tmp_path, np.arange(60) % 10, 4), packed(tmp_path, np.arange(90) % 10, 4)]
    mixture = data.mix(parts, [1, 3])
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


# Batches


def test_batch_stacks_the_rows_of_the_dataset(tmp_path):
    rows = packed(tmp_path, np.arange(30) % 10, 4)
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


def test_c77_every_batch_of_every_epoch_has_one_shape(tmp_path):
    batches = Batches(packed(tmp_path, np.arange(64) % 10, 3), global_batch=8)
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


def test_data_does_not_import_jax():
    """Reading data needs no accelerator library, so that worker processes start fast."""
    code = f"import runpy, sys; runpy.run_path({data.__file__!r}); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
