"""Protobuf messages from a table of fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.trace.profiler.messages import delimited, message_classes, prefixed

MADE = message_classes(
    "test_messages", {"Outer": {"number": (1, "int64"), "inner": (2, "*Inner")}, "Inner": {"name": (3, "string")}}
)


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_messages_behind_their_lengths_come_back(texts):
    data = b"".join(map(prefixed, texts))

    assert [text for _, text in delimited(data, "a")] == texts


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_cut_anywhere_inside_a_message_is_an_error_that_tells_the_byte(text, data):
    whole = prefixed(text)
    cut = data.draw(st.integers(1, len(whole) - 1))

    with pytest.raises(FormatError, match=r"(truncated: the message at|truncated at) byte \d"):
        list(delimited(whole[:cut], "a"))


@given(number=st.integers(-(2**63), 2**63 - 1), names=st.lists(st.text(st.characters(codec="utf-8")), max_size=3))
def test_nested_and_repeated_fields_survive(number, names):
    message = MADE["Outer"](number=number)
    for name in names:
        message.inner.add(name=name)

    back = MADE["Outer"].FromString(message.SerializeToString())

    assert back.number == number
    assert [inner.name for inner in back.inner] == names


def test_the_bytes_are_protobufs_own():
    """Field 1, varint 150 = 08 96 01, the example of the encoding's documentation."""
    assert MADE["Outer"](number=150).SerializeToString() == b"\x08\x96\x01"


def test_what_was_not_set_is_not_there():
    assert not MADE["Outer"].FromString(b"").HasField("number")
    assert MADE["Outer"].FromString(MADE["Outer"](number=0).SerializeToString()).HasField("number")
