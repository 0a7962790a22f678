"""The pickle machine: values as Python's own unpickler gives them, and bounds on what they cost."""

from __future__ import annotations

import builtins
import io
import json
import pickle
import pickletools
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammerge import CorruptFileError, UnsupportedError, pickle_machine
from streammerge.pickle_machine import MAX_CELLS, EndOfPickleError, OddKey, Stream, run, run_stream

ROOT = Path(__file__).resolve().parents[1]


class Encode:
    """``_codecs.encode``, which is a function and so would not be called."""

    def __new__(cls, text: str, encoding: str) -> Any:
        return text.encode(encoding)


class Box:
    """Takes any arguments and any state."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def set_state(self, state: object) -> None:
        self.state = state


def find_global(module: str, name: str) -> object:
    if module in ("builtins", "__builtin__"):
        return getattr(builtins, name)
    return {"encode": Encode, "Box": Box}[name]


def load(data: bytes) -> Any:
    value, end = run(data, 0, find_global, lambda pid: ("persistent", pid))
    assert end == len(data)
    return value


# --- values ---

_KEYS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 59), 1 << 59)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
_VALUES = st.recursive(
    _KEYS | st.integers(-(1 << 2000), 1 << 2000) | st.binary().map(bytearray) | st.text(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=5),
        st.sets(_KEYS, max_size=5),
        st.frozensets(_KEYS, max_size=5),
    ),
    max_leaves=30,
)


def is_encodable(value: object) -> bool:
    try:
        return bool(repr(value).encode()) and "\\ud" not in repr(value)
    except UnicodeEncodeError:
        return False


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(
    value=_VALUES.filter(is_encodable),
    protocol=st.integers(2, 5),
    optimize=st.booleans(),
    slow=st.booleans(),
)
def test_values_are_those_of_python(
    value: object, protocol: int, optimize: bool, slow: bool
) -> None:
    stream = io.BytesIO()
    (pickle._Pickler if slow else pickle.Pickler)(stream, protocol).dump(value)
    data = stream.getvalue()
    if optimize:
        data = pickletools.optimize(data)
    found = load(data)
    assert found == value
    assert repr(found) == repr(pickle.loads(data))


# --- pickles that are read bit by bit ---


def load_blocks(data: bytes, size: int, take: Any = None, cells: int = MAX_CELLS) -> Any:
    """Load a pickle in blocks of `size` bytes."""
    starts = range(0, len(data), size)
    blocks = lambda: (data[at : at + size] for at in starts)  # noqa: E731
    return run_stream(Stream(blocks, take or (lambda key, value: False), cells), find_global)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(value=_VALUES.filter(is_encodable), protocol=st.integers(2, 5), size=st.integers(1, 40))
def test_blocks_of_any_size_give_the_same_values(value: object, protocol: int, size: int) -> None:
    data = pickle.dumps(value, protocol)
    assert repr(load_blocks(data, size)) == repr(load(data))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_places_of_the_memo_are_found_across_blocks(size: int) -> None:
    rng = random.Random(0)
    pool: list[Any] = [["j", n] for n in range(300)]
    value = [rng.choice(pool) for _ in range(1000)] + pool
    found = load_blocks(pickle.dumps(value, 2), size)
    assert found == value
    assert len({id(one) for one in found}) == len(pool)


def test_a_pickle_in_blocks_that_is_cut_short() -> None:
    data = pickle.dumps([{"a": (1, 2.5, "text")}] * 3, 4)
    for end in range(len(data)):
        for size in (1, 7, 100):
            with pytest.raises(EndOfPickleError):
                load_blocks(data[:end], size)


@pytest.mark.parametrize("code", [b"}}K\x01s.", b"K\x01)R.", b"h\x00.", b"K\x01K\x01)s.", b"\xff."])
def test_what_is_refused_is_refused_in_blocks(code: bytes) -> None:
    for size in range(1, len(code) + 3):
        with pytest.raises(CorruptFileError):
            load_blocks(b"\x80\x02" + code, size)


def test_items_can_be_taken_before_they_go_into_a_dict() -> None:
    taken = []

    def take(key: Any, value: Any) -> bool:
        if value != 2:
            taken.append((key, value))
        return bool(value != 2)

    data = pickle.dumps([{"a": 1, "b": 2, (1, 2): 3}, {"c": {"d": 1}}], 4)
    assert load_blocks(data, 8, take) == [{"b": 2}, {}]
    assert taken[:2] == [("a", 1), ((1, 2), 3)]
    assert taken[2:] == [("d", 1), ("c", {})]


class Row:
    """Becomes what its state says."""

    def set_state(self, state: Any) -> Any:
        return state["row"]


def test_an_object_can_stand_for_another_value() -> None:
    data = b"\x80\x02ctest\nRow\n)\x81}X\x03\0\0\0rowK\x07sb."
    found, _ = run(data, 0, lambda module, name: Row, lambda pid: None)
    assert found == 7


def test_blocks_refer_to_nothing_outside() -> None:
    with pytest.raises(CorruptFileError, match="refers to something outside"):
        load_blocks(b"\x80\x02NQ.", 4)


def test_cells_bound_a_pickle_in_blocks() -> None:
    data = pickle.dumps([[n] for n in range(20_000)], 4)
    assert len(load_blocks(data, 4096)) == 20_000
    with pytest.raises(UnsupportedError, match="holds more than is read"):
        load_blocks(data, 4096, cells=10_000)


def test_a_long_text_takes_few_blocks() -> None:
    assert load_blocks(pickle.dumps("x" * 3_000_000, 4), 64) == "x" * 3_000_000


# --- the memo ---


@pytest.mark.parametrize("protocol", [2, 4])
def test_shared_values_stay_shared(protocol: int) -> None:
    """Places of the memo that nothing fetches are left out; all others are found again."""
    rng = random.Random(0)
    pool: list[Any] = [["jqr\x94hj" * 3, n] for n in range(2000)]
    value = [rng.choice(pool) for _ in range(10_000)] + pool
    found = load(pickle.dumps(value, protocol))
    assert found == value
    expected = {id(old): id(new) for old, new in zip(value, found, strict=True)}
    assert len(set(expected.values())) == len(expected)
    assert all(expected[id(old)] == id(new) for old, new in zip(value, found, strict=True))


@pytest.mark.parametrize(
    "code",
    [
        b"K\x01q\x00K\x02q\x00h\x00\x87",
        b"K\x01q\x00K\x02q\x00K\x03\x94h\x01\x87",  # MEMOIZE takes the first free place
        b"K\x01q\x000K\x02r\1\0\0\0K\x03r\1\0\0\0h\x01\x87",
    ],
)
def test_places_of_the_memo_that_are_taken_twice(code: bytes) -> None:
    code = b"\x80\x04" + code + b"."
    assert load(code) == pickle.loads(code)


def test_values_that_contain_themselves() -> None:
    value: list[Any] = []
    value.append(value)
    found = load(pickle.dumps(value, 2))
    assert found[0] is found


def test_objects() -> None:
    box = load(b"\x80\x02ctest\nBox\n(K\x01K\x02tR}b.")
    assert type(box) is Box
    assert (box.arguments, box.state) == ((1, 2), {})
    assert type(load(b"\x80\x02ctest\nBox\n)\x81.")) is Box
    assert type(load(b"\x80\x04\x8c\x04test\x8c\x03Box\x93)}\x92.")) is Box
    assert load(b"\x80\x02K\x05Q.") == ("persistent", 5)


def test_several_pickles_in_a_row() -> None:
    data = b"".join(pickle.dumps(n, protocol) for n, protocol in enumerate((2, 3, 4, 5)))
    at = 0
    for expected in range(4):
        value, at = run(data, at, find_global, find_global)  # type: ignore[arg-type]
        assert value == expected
    assert at == len(data)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_cut_short(protocol: int) -> None:
    value = {"a": [1, 1 << 40, 1.5], "b": ("text", b"bytes", None), "c": {1, 2}}
    data = pickle.dumps(value, protocol)
    assert load(data) == value
    for size in range(len(data)):
        with pytest.raises(EndOfPickleError):
            load(data[:size])


# --- what is refused ---


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "hole in its memo"),
        (b"\x80\x02K\x01K\x01r\1\0\0\0qqqq.", "hole in its memo"),
        (b"\x80\x02K\x01q\x05qqqqqq.", "hole in its memo"),
        (b"\x80\x02h\x00.........", "what is not there"),
        (b"\x80\x02K\x01K\x01)s.", "items for a int"),
        (b"\x80\x02]K\x01K\x01s.", "items for a list"),
        (b"\x80\x02}K\x01a.", "items for a dict"),
        (b"\x80\x02)K\x01a.", "items for a tuple"),
        (b"\x80\x04](K\x01\x90.", "items for a list"),
        (b"\x80\x02}]K\x01s.", "a list as a key"),
        (b"\x80\x02}}K\x01s.", "a dict as a key"),
        (b"\x80\x04\x8f(]\x90.", "a list as a key"),
        (b"\x80\x04(}\x91.", "a dict as a key"),
        (b"\x80\x02}(K\x01u.", "shorter"),
        (b"\x80\x02K\x01)R.", "calls what is not a function"),
        (b"\x80\x02X\x03\0\0\0abc)R.", "calls what is not a function"),
        (b"\x80\x02ctest\nBox\n]R.", "calls what is not a function"),
        (b"\x80\x02ctest\nBox\n(" + b"N" * 65 + b"tR.", "65 arguments"),
        (b"\x80\x04ctest\nBox\n)}K\x01K\x01s\x92.", "keyword arguments"),
        (b"\x80\x02ctest\nBox\n}b.", "a state for a type"),
        (b"\x80\x02}}b.", "a state for a dict"),
        (b"\x80\x02\x8b\x00\x01\x00\x00" + bytes(256) + b".", "integer of 256 bytes"),
        (b"\x80\x02X\x02\0\0\0\xff\xfe.", "utf-8"),
        (b"\x80\x02c" + b"m" * 600 + b"\nn\n.", "name of more than 512 bytes"),
        (b"\x80\x04K\x01K\x01\x93.", "whose name is not text"),
        (b"\x80\x01N.", "protocol 1"),
        (b"\x80\x06N.", "protocol 6"),
        (b"\x80\x02I1\n.", "opcode 0x49"),
        (b"\x80\x02\xff.", "opcode 0xff"),
    ],
)
def test_what_is_refused(code: bytes, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        load(code + bytes(16))


@pytest.mark.parametrize(
    "key", [(), (1, 2), ((((1,),),),), 1 << 60, -(1 << 60), frozenset({1})], ids=repr
)
def test_keys_that_hash_slowly_are_put_aside(key: object) -> None:
    for protocol in (2, 4):
        ((found, value),) = load(pickle.dumps({key: 5}, protocol)).items()
        assert (type(found), value) == (OddKey, 5)
        assert found.value == key


# --- bounds ---

# Each leaves as much in memory as it can for its length. {n} repetitions of a part.
MEMORY_BOMBS: dict[str, tuple[bytes, bytes, bytes]] = {
    "lists": (b"", b"]", b""),
    "dicts": (b"", b"}", b""),
    "dicts with an item": (b"", b"}K\x01Ns", b""),
    "sets": (b"", b"\x8f", b""),
    "sets with an item": (b"", b"\x8f(K\x01\x90", b""),
    "frozensets": (b"", b"(K\x01\x91", b""),
    "marks": (b"", b"(", b""),
    "nothing": (b"", b"N", b""),
    "the same": (b"N", b"2", b""),
    "memo": (b"N", b"\x94", b""),
    "memo and stack": (b"N", b"2\x94", b""),
    "tuples": (b"", b"N\x85", b""),
    "nested tuples": (b"N", b"\x85", b""),
    "pairs": (b"N", b"2\x86", b""),
    "long tuples": (b"", b"(" + b"N" * 64 + b"t", b""),
    "long lists": (b"]", b"(" + b"N" * 64 + b"e", b""),
    "one list": (b"]", b"Na", b""),
    "one dict": (b"}", b"J{i}_Ns", b""),
    "one set": (b"\x8f", b"(J{i}_\x90", b""),
    "short texts": (b"", b"\x8c\x02xy", b""),
    "texts of wide characters": (b"", b"\x8c\x44" + b"x" * 64 + "\U0001f525".encode(), b""),
    "bytes": (b"", b"C\x02xy", b""),
    "bytearrays": (b"", b"\x96\x01" + b"\0" * 7 + b"x", b""),
    "integers": (b"", b"J\xff\xff\xff\x70", b""),
    "long integers": (b"", b"\x8a\xff" + b"\x01" * 255, b""),
    "floats": (b"", b"G" + struct.pack(">d", 1.5), b""),
    "objects": (b"ctest\nBox\nq\x00", b"h\x00)R", b""),
    "objects with arguments": (b"ctest\nBox\n(" + b"N" * 64 + b"tq\x00", b"2h\x00R", b""),
    "copies of a text": (
        b"c_codecs\nencode\nq\x00X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"\x8c\x06latin1\x86q\x01",
        b"h\x00h\x01R",
        b"",
    ),
    "odd keys": (b"}", b"NN\x86Ns", b""),
    "persistent ids": (b"", b"NQ", b""),
}

CHILD = """
import json, os, resource, sys, time
from streammerge import StreamMergeError, pickle_machine
sys.path.insert(0, sys.argv[1])
from test_pickle_machine import load

def field(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024

pickle_machine.MAX_CELLS = int(sys.argv[2])
pickle_machine._MAX_GETS = -1  # as if all of the memo were fetched
for line in sys.stdin:
    prefix, part, suffix, count = json.loads(line)
    reader, writer = os.pipe()
    if os.fork() == 0:
        prefix, part, suffix = (code.encode("latin1") for code in (prefix, part, suffix))
        data = prefix + part * count + suffix + b"."
        if b"{i}" in part:  # in place, as this must not take memory
            data, at = bytearray(data), 0
            for i in range(count):
                at = data.index(b"{i}_", at)
                data[at : at + 4] = i.to_bytes(4, "little")
            data = bytes(data)
        before, start = field("VmRSS"), time.perf_counter()
        try:
            load(data)
            outcome = "value"
        except StreamMergeError as error:
            outcome = type(error).__name__
        seconds, peak = time.perf_counter() - start, field("VmHWM") - before
        os.write(writer, json.dumps([outcome, seconds, peak, len(data)]).encode())
        os._exit(0)
    os.close(writer)
    print(os.read(reader, 1000).decode() or json.dumps(["died", 0, 0, 0]), flush=True)
    os.wait()
"""


def run_apart(cases: list[tuple[bytes, bytes, bytes, int]], cells: int) -> list[Any]:
    """Outcome, seconds, bytes of memory and bytes of pickle of each case, in its own process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(cells)],
        input="".join(
            json.dumps([part.decode("latin1") for part in case[:3]] + [case[3]]) + "\n"
            for case in cases
        ),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_memory_is_bounded() -> None:
    """Whatever fills the memory fastest, it is not much more than the cells that are counted."""
    cells = 1 << 19  # 32 MiB
    cases = [(*bomb, 3_000_000 // len(bomb[1])) for bomb in MEMORY_BOMBS.values()]
    results = dict(zip(MEMORY_BOMBS, run_apart(cases, cells), strict=True))
    bound = cells * pickle_machine.CELL_BYTES
    over = {
        name: f"{peak / 2**20:.0f} MiB"
        for name, (_, _, peak, length) in results.items()
        if peak > bound + 2 * length + (1 << 20)
    }
    assert over == {}
    outcomes = {name: outcome for name, (outcome, *_) in results.items()}
    assert set(outcomes.values()) <= {"UnsupportedError", "value", "CorruptFileError"}
    refused = [name for name, outcome in outcomes.items() if outcome == "UnsupportedError"]
    assert len(refused) > 20, outcomes


def test_the_length_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_machine, "MAX_BYTES", 1000)
    assert load(b"]" * 999 + b".") == []
    with pytest.raises(UnsupportedError, match="larger than anything that is read"):
        load(b"]" * 1000 + b".")


# Sixty tuples of twice the one before: as a key, Python hashes 2**60 of them.
DOUBLED = b"N" + b"2\x86" * 60
DEEP = 300_000
TIME_BOMBS: dict[str, bytes] = {
    "a key": b"}" + DOUBLED + b"Ns",
    "a key among others": b"}(K\x01N" + DOUBLED + b"Nu",
    "an item of a set": b"\x8f(" + DOUBLED + b"\x90",
    "an item of a frozenset": b"(" + DOUBLED + b"\x91",
    "frozensets as keys": b"}(K\x01\x91q\x00" + b"0(h\x00K\x01\x91q\x00" * 60 + b"h\x00N0s",
    "a deep key": b"}N" + b"\x85" * DEEP + b"Ns",
    "deep tuples": b"N" + b"\x85" * DEEP,
    "deep lists": b"]" * DEEP + b"a" * (DEEP - 1),
    "deep dicts": b"}K\x01" * DEEP + b"N" + b"s" * DEEP,
    "deep sets": b"(" * DEEP + b"\x91" * DEEP,
    "deep objects": b"ctest\nBox\nq\x00N" + b"\x85q\x01h\x00h\x01R" * (DEEP // 4),
    "deep states": b"ctest\nBox\nq\x00)R" + b"q\x01h\x00)Rh\x01b" * (DEEP // 4),
    "deep odd keys": b"N" + b"\x85q\x00}h\x00Ns\x86" * (DEEP // 4),
    "keys that collide": b"}("
    + b"".join(
        b"\x8a\x0a" + (n * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for n in range(50_000)
    )
    + b"u",
    "keys of equal low bits": b"}("
    + b"".join(b"\x8a\x08" + (n << 40).to_bytes(8, "little") + b"N" for n in range(50_000))
    + b"u",
    "tuples as keys": b"}("
    + b"".join(b"J%s\x85N" % struct.pack("<i", n) for n in range(50_000))
    + b"u",
    "a memo of 2**31 places": b"Nr\xff\xff\xff\x7f",
    "a fetch from 2**32 places": b"j\xff\xff\xff\xff",
    "a text of 4 GiB": b"X\xff\xff\xff\xff",
    "a text of 16 EiB": b"\x8d" + b"\xff" * 8,
    "a bytearray of 8 EiB": b"\x96" + b"\xff" * 7 + b"\x7f",
    "an integer of 2 GiB": b"\x8b\xff\xff\xff\x7f",
    "a frame of 16 EiB": b"\x95" + b"\xff" * 8,
    "a name without end": b"c" + b"x" * 1_000_000,
}


def test_time_is_bounded() -> None:
    """And nothing kills the process: values are made and freed without recursion."""
    cases = [(b"", code, b"", 1) for code in TIME_BOMBS.values()]
    results = dict(zip(TIME_BOMBS, run_apart(cases, pickle_machine.MAX_CELLS), strict=True))
    assert [name for name, result in results.items() if result[0] == "died"] == []
    values = [name for name, result in results.items() if result[0] == "value"]
    assert values == list(TIME_BOMBS)[: len(values)]
    assert values[-1] == "tuples as keys"
    assert {name: seconds for name, (_, seconds, *_) in results.items() if seconds > 5} == {}
    assert {name: peak for name, (_, _, peak, _) in results.items() if peak > 200 << 20} == {}
