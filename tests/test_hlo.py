"""The spellings of HLO that `jfsdp.audit.hlo` takes apart."""

import pytest

from jfsdp.audit import hlo

ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(("text", "groups"), [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", ROWS),
    ("replica_groups={{3,1,2,0},{4,6,5,7}}", ROWS),
    ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", COLUMNS),
    ("replica_groups=[2,4]<=[8], dimensions={0}", ROWS),
    ("replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true", COLUMNS),
    ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("replica_groups=mesh['replica'=2,'shard'=4] {'shard'}, dimensions={0}", ROWS),
    ("replica_groups=mesh['replica'=2,'shard'=4] {'replica'}", COLUMNS),
    ("replica_groups=mesh['replica'=2,'shard'=4] {'shard','replica'}", (tuple(range(8)),)),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ROWS),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=(4,5,6,7,0,1,2,3) {'b'}", ROWS),
    ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}, dimensions={0}", PAIRS),
    ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", COLUMNS),
    ("source_target_pairs={{0,1},{1,0}}, channel_id=1", ((0, 1), (1, 0))),
])
def test_groups_of_devices_are_read_in_every_spelling(text, groups):
    assert hlo.device_groups(f"%x), channel_id=1, {text}", 8) == groups


def test_an_unknown_spelling_of_groups_is_refused():
    with pytest.raises(ValueError, match="cannot read the groups of devices.*Please report it"):
        hlo.device_groups("%x), replica_groups=triangles", 8)


@pytest.mark.parametrize(("name", "dtype"), [
    ("f32", "float32"), ("bf16", "bfloat16"), ("s8", "int8"), ("i8", "int8"), ("ui32", "uint32"),
    ("pred", "bool"), ("i1", "bool"), ("f8e4m3fn", "float8_e4m3fn"), ("f8E5M2", "float8_e5m2"),
    ("c64", "complex64"), ("token", "token")])
def test_element_types_get_their_jax_names(name, dtype):
    assert hlo.dtype(name) == dtype
