"""The safetensors format: equal to what the `safetensors` package reads and writes, one tensor in memory at a time."""

import json
import resource
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from jfsdp.safetensors import Entry, read_safetensors, write_safetensors

DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "uint8", "bool"]


def values(shape=(3, 5), dtypes=DTYPES):
    rng = np.random.default_rng(0)
    dtype = lambda name: getattr(ml_dtypes, name, None) or np.dtype(name)  # noqa: E731
    return {f"part.{name}": (4 * rng.normal(size=shape)).astype(dtype(name)) for name in dtypes}


def entries(tensors):
    return [Entry(name, a.shape, a.dtype, lambda a=a: a) for name, a in tensors.items()]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_every_dtype_comes_back_bitwise_with_slices_and_scalars(tmp_path):
    tensors = {**values(), "scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4), np.float32)}
    write_safetensors(tmp_path, entries(tensors))
    found = read_safetensors(tmp_path)
    assert set(found) == set(tensors)
    for name, a in tensors.items():
        assert (found[name].shape, found[name].dtype) == (a.shape, a.dtype)
        assert same(found[name][...], a)
    assert same(found["part.bfloat16"][1:3, ::2], tensors["part.bfloat16"][1:3, ::2])


def test_an_independent_reader_agrees_and_finds_the_alias(tmp_path):
    """C-49: one name is written, the alias is recorded, every name of the index is in its file."""
    safetensors = pytest.importorskip("safetensors")
    tensors = values(dtypes=["float32", "float16", "int32"])
    files = write_safetensors(tmp_path, entries(tensors), aliases={"tied": "part.float16"}, max_file_bytes=64)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"] == {"total_size": 15 * 10, "aliases": {"tied": "part.float16"}}
    assert set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "np") as opened:
            assert same(opened.get_tensor(name), tensors[name])
            assert ("tied" in opened.metadata()) == (name == "part.float16")


def test_files_of_the_package_are_read(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    tensors = values(dtypes=["float32", "float64", "uint8"])
    save_file(tensors, tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        assert all(same(tensor[...], tensors[name]) for name, tensor in read_safetensors(source).items())


def test_writing_and_reading_hold_one_tensor(tmp_path):
    big, count = np.dtype(np.float32), 8
    shape = (256, 1024)  # 1 MiB

    def entry(i):
        return Entry(f"t{i}", shape, big, lambda: np.full(shape, i, big))

    tracemalloc.start()
    write_safetensors(tmp_path, [entry(i) for i in range(count)], max_file_bytes=3 << 20)
    wrote = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    found = read_safetensors(tmp_path).values()
    sums = [float(tensor[...].mean()) for tensor in found]
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    sums_of_columns = [float(tensor[:, :8].mean()) for tensor in found]
    read_part = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sums == sums_of_columns == list(range(count))
    assert read_part < 0.1 * (1 << 20)  # a part is read, not cut out of the whole
    assert wrote < 1.5 * (1 << 20) and read < 1.5 * (1 << 20)


def test_only_the_writer_writes_and_all_fetch(tmp_path):
    fetched = []
    entry = Entry("a", (2,), np.float32, lambda: fetched.append(1) or np.zeros(2, np.float32))
    write_safetensors(tmp_path / "out", [entry], is_writer=False)
    assert fetched == [1] and not (tmp_path / "out").exists()


def test_a_fetch_that_fails_leaves_no_file_under_its_name(tmp_path):
    def fail():
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        write_safetensors(tmp_path, [Entry("a", (2,), np.float32, fail)])
    assert not list(tmp_path.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}


def test_a_full_disk_is_told_with_the_file_and_leaves_the_set_that_was_there(tmp_path):
    write_safetensors(tmp_path, entries(values()), max_file_bytes=64)
    before = contents(tmp_path)
    third = sorted(before)[2]
    (tmp_path / f"{third}.part").symlink_to("/dev/full")
    with pytest.raises(OSError) as error:
        write_safetensors(tmp_path, entries({name: a[::-1] for name, a in values().items()}), max_file_bytes=64)
    assert f"{third}, a file of {len(before[third])} bytes, could not be written" in str(error.value)
    assert "No space left on device. Make room, or name another folder" in str(error.value)
    assert contents(tmp_path) == before


def test_a_file_that_cannot_grow_is_told_with_its_bytes_and_goes(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"a file of 4,194,\d\d\d bytes, could not be written: File too large. Make"):
            write_safetensors(tmp_path, [Entry("a", (1 << 20,), np.float32, lambda: np.ones(1 << 20, np.float32))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_refused_in_words(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/out cannot be made: Not a directory. Name another one"):
        write_safetensors(tmp_path / "file/out", entries(values()))


def test_a_new_set_takes_the_place_of_an_old_one_and_of_what_a_killed_process_left(tmp_path):
    write_safetensors(tmp_path, entries(values()), max_file_bytes=64)
    for name in ("model.safetensors.part", "model-00001-of-00009.safetensors.part", "model.safetensors.old", "other"):
        (tmp_path / name).write_text("left")
    write_safetensors(tmp_path, entries(values(dtypes=["int32"])))
    assert set(contents(tmp_path)) == {"model.safetensors", "model.safetensors.old", "other"}
    assert set(read_safetensors(tmp_path)) == {"part.int32"}


def test_what_was_not_announced_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a was announced as float32\[2\] and came as float64\[3\]"):
        write_safetensors(tmp_path, [Entry("a", (2,), np.float32, lambda: np.zeros(3))])
    with pytest.raises(ValueError, match="must differ"):
        write_safetensors(tmp_path, entries(values()) * 2)
    with pytest.raises(ValueError, match="an alias must mean a tensor that is written"):
        write_safetensors(tmp_path, entries(values()), aliases={"b": "nothing"})


def test_a_cut_off_file_is_refused_by_name(tmp_path):
    (file,) = write_safetensors(tmp_path, entries(values()))
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 40, 0):
        file.write_bytes(whole[:size])
        with pytest.raises(
            ValueError, match="model.safetensors cannot be read as safetensors.*Fetch or export it again"
        ):
            read_safetensors(tmp_path)


def test_an_index_that_names_too_much_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no .safetensors files. Give a folder as the Hugging Face hub"):
        read_safetensors(tmp_path)
    write_safetensors(tmp_path, entries(values()), max_file_bytes=64)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["part.float32"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names ghost, which no file holds"):
        read_safetensors(tmp_path)
    for text in ("{", "[]", "{}", '{"weight_map": ["a"]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"index.json has no weight_map that can be read .*\. Fetch it again"):
            read_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_not_read_but_told_how_to_convert(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match=f"{name} is a pickle, .* transformers and save_pretrained it: that writes"):
        read_safetensors(tmp_path)


def test_a_pointer_of_git_lfs_and_an_impossible_place_are_told(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n")
    with pytest.raises(ValueError, match="pointer of Git LFS, and `git lfs pull` gets the file"):
        read_safetensors(tmp_path)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        read_safetensors(tmp_path)
