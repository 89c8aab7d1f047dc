"""`jfsdp.data`: what is read, how it is packed, and what is refused.

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
from jfsdp.data import END_OF_TEXT, load

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


def test_digest_is_of_the_ids_alone_and_tells_any_other_one(tmp_path, monkeypatch):
    """Not of the file's name, kind or dtype; every id of a short stream counts, samples of a longer one."""
    ids = np.random.default_rng(0).integers(1, 9, 3000)
    whole = packed(tmp_path, ids, 7)
    ids.astype("<u2").tofile(tmp_path / "moved.bin")
    assert load(tmp_path / "moved.bin", seq_len=7, held_out=0, vocab_size=10)[0].digest == whole.digest
    assert pickle.loads(pickle.dumps(whole)).digest == whole.digest
    others = [(ids, 8, {}), (ids, 7, {"end_of_document": END}), (ids[:-1], 7, {})]
    others += [(np.where(np.arange(3000) == i, 0, ids), 7, {}) for i in (0, 1499, 2999)]
    digests = [packed(tmp_path, other, seq_len, **more).digest for other, seq_len, more in others]
    assert whole.digest not in digests and len({*digests}) == len(digests)
    monkeypatch.setattr(data, "_STRETCH", 4)
    sampled = packed(tmp_path, ids, 7).digest
    changed = [packed(tmp_path, np.where(np.arange(3000) == i, 0, ids), 7).digest for i in (0, 1500, 4)]
    assert [digest == sampled for digest in changed] == [False, False, True]  # 4 of every 46 or 47 are looked at


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


def test_data_does_not_import_jax():
    """Reading is of use without an accelerator library."""
    code = f"import runpy, sys; runpy.run_path({data.__file__!r}); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
