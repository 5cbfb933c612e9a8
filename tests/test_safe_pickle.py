"""Pickles without execution: what is read is inert, what is written torch reads."""

import contextlib
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.core.files.inert import StandIn
from headway.storage.formats.safe_pickle import Call, Global, Instance, Pairs, dumps, load_from, loads, path_of

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(value=plain)
def test_plain_values_come_back_from_the_standard_unpickler(value):
    assert pickle.loads(dumps(value)) == value


@given(value=plain, protocol=st.integers(0, 5))
def test_plain_values_of_every_protocol_are_read(value, protocol):
    told = loads(pickle.dumps(value, protocol), "a.pkl", lenient=True)

    assert protocol < 3 or told == value  # before 3, bytes are calls of _codecs.encode, which stay calls


@given(value=plain, cut=st.integers(0, 200))
def test_a_pickle_cut_short_is_an_error_and_nothing_else(value, cut):
    data = dumps(value)

    with pytest.raises(FormatError, match=r"a.pkl is no whole pickle"):
        loads(data[: min(cut, len(data) - 1)], "a.pkl")


@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), min_size=1, max_size=3))
def test_a_damaged_metadata_pickle_is_read_or_refused_but_never_crashes(flips):
    data = bytearray(dumps(Instance(Global("torch.distributed.checkpoint.metadata", "Metadata"), {"a": [1, (2, "x")]})))
    for at, bit in flips:
        data[at % len(data)] ^= 1 << bit

    with contextlib.suppress(FormatError):
        loads(bytes(data), "a.pkl")


def test_torch_reads_what_is_written_for_it():
    size = Call(Global("torch", "Size"), ((2, 3),))
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))

    told = pickle.loads(dumps({"size": size, "dtype": Global("torch", "bfloat16"), "layout": layout, "again": size}))

    assert told == {
        "size": torch.Size((2, 3)), "dtype": torch.bfloat16, "layout": torch.strided, "again": torch.Size((2, 3)),
    }  # fmt: skip


def test_what_torch_writes_is_read_as_stand_ins():
    told = loads(pickle.dumps([torch.Size((4, 5)), torch.float16, torch.device("cpu"), OrderedDict(a=1)]), "a.pkl")

    assert [path_of(entry) for entry in told[:3]] == ["torch.Size", "torch.float16", "torch.device"]
    assert told[0].args == ((4, 5),)
    assert told[3] == OrderedDict(a=1)


def test_a_dict_with_objects_for_keys_is_written():
    told = pickle.loads(dumps(Pairs(((("x", 1), 2),))))

    assert told == {("x", 1): 2}


class Evil:
    """What an attacker puts into a pickle."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], tuple(self.call[1:])


@pytest.mark.parametrize("call", [(eval, "1/0"), (print, "x"), (getattr, 1, "real"), (__import__, "os")], ids=str)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_calls_anything_else_is_refused_by_name(call, protocol):
    with pytest.raises(FormatError, match=rf"a.pkl calls builtins.{call[0].__name__}|__builtin__.*it may be an attack"):
        loads(pickle.dumps(Evil(*call), protocol), "a.pkl")


MEMORY_FORMAT = Global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")


def test_a_member_of_an_enumeration_as_python_3_11_2_writes_it_is_the_one_that_others_write():
    by_name = dumps(Call(Global("builtins", "getattr"), (MEMORY_FORMAT, "TORCH_PRESERVE_FORMAT")))
    by_value = dumps(Call(MEMORY_FORMAT, (2,)))

    members = [loads(data, "a.pkl") for data in (by_name, by_value)]
    assert [(path_of(member), member.args) for member in members] == [(".".join(MEMORY_FORMAT), (2,))] * 2
    assert pickle.loads(by_name) is pickle.loads(by_value)


@pytest.mark.parametrize(
    "args",
    [
        (MEMORY_FORMAT, "__class__"), (MEMORY_FORMAT, "mro"), (MEMORY_FORMAT, "TORCH_CHANNELS_LAST.value"),
        (MEMORY_FORMAT, "TORCH_CHANNELS_LAST", 1), (MEMORY_FORMAT,), (Global("torch", "Size"), "count"),
        (Call(MEMORY_FORMAT, (1,)), "TORCH_CHANNELS_LAST"), ("torch", "load"), (MEMORY_FORMAT, 1),
    ],
    ids=str,
)  # fmt: skip
def test_getattr_of_anything_else_is_refused(args):
    with pytest.raises(FormatError, match=r"a.pkl calls builtins.getattr.*it may be an attack"):
        loads(dumps(Call(Global("builtins", "getattr"), args)), "a.pkl")


def test_even_a_lenient_reader_runs_nothing(tmp_path):
    trace = tmp_path / "ran"
    data = pickle.dumps(Evil(exec, f"open({str(trace)!r}, 'w')"))

    told = loads(data, "a.pkl", lenient=True)

    assert isinstance(told, StandIn)
    assert not trace.exists()
    assert path_of(told) == "builtins.exec"


def test_a_pickle_cannot_change_the_reader_for_the_next_one():
    # BUILD on a class sets attributes on it: here on a stand-in that lives for this pickle only
    poison = b"\x80\x02ctorch\nSize\n(N}X\x04\x00\x00\x00pathX\x01\x00\x00\x00xstb."

    with pytest.raises(FormatError):
        loads(poison, "a.pkl")
    assert path_of(loads(dumps(Global("torch", "Size")), "a.pkl")) == "torch.Size"
    assert StandIn.path == ""


class Referring(pickle.Pickler):
    """Writes the text `here` as a reference."""

    def persistent_id(self, value):
        return ("storage", 1) if isinstance(value, str) and value == "here" else None


def test_references_to_storages_are_kept_only_where_they_belong():
    file = io.BytesIO()
    Referring(file, 2).dump(["here"])

    assert loads(file.getvalue(), "a.pkl", persistent=True) == [("storage", 1)]
    with pytest.raises(FormatError, match="refers to storages outside of it"):
        loads(file.getvalue(), "a.pkl")


def test_a_stream_of_pickles_is_read_one_by_one():
    data = dumps(1) + dumps("two") + b"rest"

    first, at = load_from(data, 0, "a.pkl")
    second, end = load_from(data, at, "a.pkl")

    assert (first, second, data[end:]) == (1, "two", b"rest")


def test_what_cannot_be_written_is_said():
    with pytest.raises(InputError, match=r"a set cannot be pickled here.*Use plain values only"):
        dumps({"a": {1, 2}})


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02K\x01r\xff\xff\xff\x7f.", b"I1\np4294967296\n.", b"I1\np" + b"9" * 5000 + b"\n.",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
        b"\x80\x04]\x8e" + (1 << 40).to_bytes(8, "little") + b"a.", b"\x80\x02X\xff\xff\xff\x7fab.",
    ],
)  # fmt: skip
def test_a_flipped_length_does_not_take_memory(data):
    with pytest.raises(FormatError, match=r"asks for room for \d{10,}"):
        loads(data, "a.pkl")
