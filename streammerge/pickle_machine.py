"""Runs the opcodes of a pickle within fixed bounds. Knows nothing of torch.

Python's own unpickler can be kept from running code, but not from running away: one opcode
allocates 16 GiB of memo; sixty nested tuples as the key of a dict are hashed for centuries in C,
where no signal reaches; deeper ones overflow its stack. Here nothing recurses, the memo has no
holes, keys hash in constant time, and what the values may take in memory is counted.

Protocols 2 to 5 are known, which are those that torch.save writes. See Python's `pickletools` for
what the opcodes do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from streammerge.errors import CorruptFileError, UnsupportedError

# What values take is counted in cells. The pickle of 45,000 DTensors has 17 MB and takes 7 million
# cells, that of a ShardedTensor over 512 ranks 60 KB and 26,000 cells.
MAX_BYTES = 128 << 20
MAX_CELLS = 32 << 20
CELL_BYTES = 64
MAX_ARGUMENTS = 64
MAX_INT_BYTES = 255  # as many as LONG1 can have; hashes of device meshes have 8
_MAX_INT_KEY = 1 << 60  # larger ones can be chosen to collide
_MAX_NAME_BYTES = 512
_MAX_GETS = 1 << 22
_BATCH = 4096  # opcodes between two looks at the count
_CELLS_PER_BATCH = _BATCH // 2  # an opcode leaves a reference, and takes time

_MARK, _STOP, _POP, _POP_MARK, _DUP, _PROTO, _FRAME = b"(.012\x80\x95"
_NONE, _NEWTRUE, _NEWFALSE, _BINPERSID = b"N\x88\x89Q"
_BININT, _BININT1, _BININT2, _LONG1, _LONG4, _BINFLOAT = b"JKM\x8a\x8bG"
_SHORT_BINUNICODE, _BINUNICODE, _BINUNICODE8 = b"\x8cX\x8d"
_SHORT_BINBYTES, _BINBYTES, _BINBYTES8, _BYTEARRAY8 = b"CB\x8e\x96"
_EMPTY_TUPLE, _TUPLE, _TUPLE1, _TUPLE2, _TUPLE3 = b")t\x85\x86\x87"
_EMPTY_LIST, _APPEND, _APPENDS = b"]ae"
_EMPTY_DICT, _SETITEM, _SETITEMS = b"}su"
_EMPTY_SET, _ADDITEMS, _FROZENSET = b"\x8f\x90\x91"
_BINPUT, _LONG_BINPUT, _MEMOIZE, _BINGET, _LONG_BINGET = b"qr\x94hj"
_GLOBAL, _STACK_GLOBAL, _REDUCE, _NEWOBJ, _NEWOBJ_EX, _BUILD = b"c\x93R\x81\x92b"

_U8, _U16, _U32, _U64, _I32, _F64 = map(struct.Struct, ("<B", "<H", "<I", "<Q", "<i", ">d"))
_NUMBERS = {_BININT2: _U16, _BININT: _I32, _BINFLOAT: _F64}
_LENGTHS = {
    **{_LONG1: _U8, _LONG4: _U32},
    **{_SHORT_BINUNICODE: _U8, _BINUNICODE8: _U64},
    **{_SHORT_BINBYTES: _U8, _BINBYTES: _U32, _BINBYTES8: _U64, _BYTEARRAY8: _U64},
}


class EndOfPickleError(CorruptFileError):
    """The bytes end before the pickle does."""


class OddKey:
    """Stands for a key that may not hash in constant time. Keys of state dicts are strings."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def ends_too_early() -> EndOfPickleError:
    """The error for a pickle that is cut short."""
    return EndOfPickleError("the pickle is damaged: it ends too early")


def damaged(problem: str) -> CorruptFileError:
    """The error for a pickle that is not as torch.save writes them."""
    return CorruptFileError(f"the pickle is damaged: {problem}")


@dataclass(frozen=True, slots=True)
class Stream:
    """A pickle that is read block by block, and whose values need not be kept.

    Attributes:
        blocks: the bytes from the start, in blocks of any length; called twice.
        take_item: called with a key and its value before they go into a dict; if it returns true
            they do not.
        max_cells: of its values, which are counted as if all were kept.
    """

    blocks: Callable[[], Iterator[bytes]]
    take_item: Callable[[Any, Any], bool]
    max_cells: int


def run_stream(stream: Stream, find_global: Callable[[str, str], object]) -> Any:
    """Run a pickle without persistent ids whose bytes are not all in memory.

    In place of an object, what its `set_state` returns is used, unless that is None.

    Returns:
        The value. What follows the pickle is not looked at.

    Raises:
        As `run` does.
    """

    def refuse(pid: object) -> object:
        raise damaged("it refers to something outside")

    return run(b"", 0, find_global, refuse, stream)[0]


def run(
    data: bytes,
    start: int,
    find_global: Callable[[str, str], object],
    find_persistent: Callable[[Any], object],
    stream: Stream | None = None,
) -> tuple[Any, int]:
    """Run one pickle.

    Values are dicts, lists, sets, tuples, strings, bytes, numbers, None, and what the two
    functions return. Classes that `find_global` returns may be called with any arguments; objects
    of a class with a method `set_state` are given any state, those of one with `take_items` any
    items.

    Args:
        data: what the pickle lies in.
        start: where it starts.
        find_global: the value of an attribute of a module.
        find_persistent: the object that a persistent id stands for.
        stream: where the rest of the bytes come from, see `run_stream`.

    Returns:
        The value, and where the pickle ends in the last bytes that were read.

    Raises:
        EndOfPickleError: `data` ends before the pickle does.
        CorruptFileError: it is no pickle, or none that torch.save writes.
        UnsupportedError: it is larger than the bounds.
        StreamMergeError: whatever the two functions and the classes raise.
    """
    at = start
    stack: list[Any] = []
    append = stack.append
    below: list[list[Any]] = []  # the stacks that marks cover
    memo: dict[int, Any] = {}
    puts = 0  # places of the memo that are taken
    u32 = _U32.unpack_from
    blocks: Iterator[bytes] = iter(())
    take_item = None
    if stream is not None:
        cells, take_item, blocks = stream.max_cells, stream.take_item, stream.blocks()
        wanted = _find_gets(stream.blocks)
    elif len(data) - start <= MAX_BYTES:
        cells, wanted = MAX_CELLS, _find_gets(lambda: (data,), start)
    else:
        cells, wanted = -1, bytearray()
    while cells >= 0:
        try:
            cells -= _CELLS_PER_BATCH
            for _ in range(_BATCH):
                code = data[at]
                # The more frequent ones first: the first three are 60 % of a rank file.
                if code == _LONG_BINPUT:
                    index = u32(data, at + 1)[0]
                    if index == puts:
                        puts += 1
                    elif index > puts:
                        raise damaged("a hole in its memo")
                    if wanted[index]:
                        memo[index] = stack[-1]
                        cells -= 2
                    at += 5
                elif code == _BINGET:
                    append(memo[data[at + 1]])
                    at += 2
                elif code == _BININT1:
                    append(data[at + 1])
                    at += 2
                elif code == _TUPLE1:
                    stack[-1] = (stack[-1],)
                    cells -= 1
                    at += 1
                elif code == _MARK:
                    below.append(stack)
                    stack = []
                    append = stack.append
                    cells -= 1
                    at += 1
                elif code == _TUPLE2:
                    value = stack.pop()
                    stack[-1] = (stack[-1], value)
                    cells -= 1
                    at += 1
                elif code == _REDUCE or code == _NEWOBJ:  # noqa: PLR1714, SIM109 (a set is slower)
                    arguments = stack.pop()
                    value = stack[-1] = _call(stack[-1], arguments)
                    cells -= 3
                    if type(value) is bytes:  # a copy, of any length
                        cells -= len(value) // CELL_BYTES
                        if cells < 0:
                            break
                    at += 1
                elif code == _TUPLE:
                    value = tuple(stack)
                    stack = below.pop()
                    append = stack.append
                    append(value)
                    cells -= 1 + len(value) // 8
                    at += 1
                elif code == _BINUNICODE:
                    end = at + 5 + u32(data, at + 1)[0]
                    if end > len(data):
                        raise ends_too_early()
                    append(data[at + 5 : end].decode())
                    cells -= 1 + (end - at) // 16  # one character can make all four bytes wide
                    at = end
                elif code == _EMPTY_TUPLE:
                    append(())
                    at += 1
                elif code == _EMPTY_DICT:
                    append({})
                    cells -= 3
                    at += 1
                elif code == _NEWFALSE:
                    append(False)
                    at += 1
                elif code == _NONE:
                    append(None)
                    at += 1
                elif code == _SETITEMS:
                    items = stack
                    stack = below.pop()
                    append = stack.append
                    _set_items(stack[-1], items, take_item)
                    cells -= len(items)
                    at += 1
                elif code == _BUILD:
                    state = stack.pop()
                    stack[-1] = _build(stack[-1], state)
                    at += 1
                elif code == _SETITEM:
                    value, key = stack.pop(), stack.pop()
                    _set_items(stack[-1], (key, value), take_item)
                    cells -= 2
                    at += 1
                elif code == _BINPERSID:
                    stack[-1] = find_persistent(stack[-1])
                    cells -= 4
                    at += 1
                elif code == _TUPLE3:
                    third, second = stack.pop(), stack.pop()
                    stack[-1] = (stack[-1], second, third)
                    cells -= 1
                    at += 1
                elif code == _BINPUT:
                    index = data[at + 1]
                    if index == puts:
                        puts += 1
                    elif index > puts:
                        raise damaged("a hole in its memo")
                    if wanted[index]:
                        memo[index] = stack[-1]
                        cells -= 2
                    at += 2
                elif code == _LONG_BINGET:
                    append(memo[u32(data, at + 1)[0]])
                    at += 5
                elif code in _LENGTHS:
                    begin = at + 1 + _LENGTHS[code].size
                    end = begin + _LENGTHS[code].unpack_from(data, at + 1)[0]
                    if end > len(data):
                        raise ends_too_early()
                    append(_decode(code, data[begin:end]))
                    cells -= 1 + (end - begin) // 16
                    at = end
                elif code in _NUMBERS:
                    append(_NUMBERS[code].unpack_from(data, at + 1)[0])
                    cells -= 1
                    at += 1 + _NUMBERS[code].size
                elif code == _MEMOIZE:
                    if wanted[puts]:
                        memo[puts] = stack[-1]
                        cells -= 2
                    puts += 1
                    at += 1
                elif code == _EMPTY_LIST:
                    append([])
                    cells -= 2
                    at += 1
                elif code == _APPEND:
                    value = stack.pop()
                    _extend(stack[-1], (value,))
                    at += 1
                elif code == _APPENDS:
                    items = stack
                    stack = below.pop()
                    append = stack.append
                    _extend(stack[-1], items)
                    at += 1
                elif code == _NEWTRUE:
                    append(True)
                    at += 1
                elif code == _GLOBAL:
                    module, end = _read_line(data, at + 1)
                    name, end = _read_line(data, end)
                    append(find_global(module, name))
                    at = end
                elif code == _STACK_GLOBAL:
                    name = stack.pop()
                    stack[-1] = _find(find_global, stack[-1], name)
                    at += 1
                elif code == _NEWOBJ_EX:
                    keywords, arguments = stack.pop(), stack.pop()
                    if keywords != {}:
                        raise damaged("it calls with keyword arguments")
                    stack[-1] = _call(stack[-1], arguments)
                    cells -= 3
                    at += 1
                elif code == _EMPTY_SET:
                    append(set())
                    cells -= 4
                    at += 1
                elif code == _ADDITEMS:
                    items = stack
                    stack = below.pop()
                    append = stack.append
                    _add_items(stack[-1], items)
                    cells -= len(items)
                    at += 1
                elif code == _FROZENSET:
                    items = stack
                    stack = below.pop()
                    append = stack.append
                    append(frozenset(map(_key, items)))
                    cells -= 4 + len(items)
                    at += 1
                elif code == _POP:
                    stack.pop()
                    at += 1
                elif code == _POP_MARK:
                    stack = below.pop()
                    append = stack.append
                    at += 1
                elif code == _DUP:
                    append(stack[-1])
                    at += 1
                elif code == _PROTO:
                    if not 2 <= data[at + 1] <= 5:
                        raise damaged(f"protocol {data[at + 1]}, expected 2 to 5")
                    at += 2
                elif code == _FRAME:
                    if at + 9 > len(data):
                        raise ends_too_early()
                    at += 9
                elif code == _STOP:
                    return stack.pop(), at + 1
                else:
                    raise damaged(f"opcode {code:#04x}, which torch.save does not write")
        except (EndOfPickleError, LookupError, struct.error) as error:
            is_end = at + 9 > len(data)  # the longest opcode with an operand of fixed size
            if is_end or isinstance(error, EndOfPickleError):
                # No opcode has changed anything by then, so it can be taken up again.
                rest = _read_on(data[at:], blocks)
                if len(rest) == len(data) - at:
                    raise ends_too_early() from error
                data, at = rest, 0
                continue
            raise damaged("an opcode takes what is not there") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise damaged(str(error)) from error
        except MemoryError as error:
            raise CorruptFileError("the pickle asks for more memory than there is") from error
    if stream is not None:
        raise UnsupportedError(
            f"its pickle holds more than is read (values of {stream.max_cells * CELL_BYTES:,} "
            "bytes)"
        )
    raise UnsupportedError(
        f"its pickle is larger than anything that is read ({MAX_BYTES >> 20} MiB, or values of "
        f"{MAX_CELLS * CELL_BYTES >> 20} MiB)",
        hint="a rank file's pickle holds names and shapes only; is this one?",
    )


def _read_on(rest: bytes, blocks: Iterator[bytes]) -> bytes:
    """The rest of what was read and at least as much again, if there is that much."""
    parts, missing = [rest], max(1, len(rest))
    while missing > 0 and (block := next(blocks, b"")):
        parts.append(block)
        missing -= len(block)
    return b"".join(parts)


def _find_gets(blocks: Callable[[], Iterable[bytes]], start: int = 0) -> bytearray:
    """For each place of the memo whether it may be fetched. The others need not be filled.

    Most are never fetched, and what nothing else holds is then freed at once. Each LONG_BINGET
    starts with its byte, though not each such byte is one, so this finds them all.
    """
    code = bytes([_LONG_BINGET])
    size, gets = 1, 0
    for block in blocks():
        size += sum(block.count(put, start) for put in (b"q", b"r", b"\x94"))
        gets += block.count(code, start)
    if gets > _MAX_GETS:
        return bytearray(b"\1") * size
    wanted = bytearray(size)
    wanted[:256] = b"\1" * min(256, size)
    end = b""  # of the block before, which an opcode may begin in
    for block in blocks():
        data = end + block if end else block
        at = data.find(code, start)
        while 0 <= at <= len(data) - 5:
            index = _U32.unpack_from(data, at + 1)[0]
            if index < size:
                wanted[index] = 1
            at = data.find(code, at + 1)
        end = data[-4:]
    return wanted


def _call(function: Any, arguments: Any) -> object:
    if type(function) is not type or type(arguments) is not tuple:
        raise damaged("it calls what is not a function")
    if len(arguments) > MAX_ARGUMENTS:
        raise damaged(f"it calls with {len(arguments):,} arguments")
    return function(*arguments)


def _build(target: object, state: object) -> object:
    set_state = getattr(type(target), "set_state", None)
    if set_state is None:
        raise damaged(f"a state for a {type(target).__name__}")
    replacement = set_state(target, state)
    return target if replacement is None else replacement


def _set_items(target: Any, items: Any, take: Callable[[Any, Any], bool] | None) -> None:
    if not isinstance(target, dict):
        _give_items(target, items)
        return
    for key, value in zip(items[::2], items[1::2], strict=True):
        if take is None or not take(key, value):
            target[key if type(key) is str else _key(key)] = value


def _extend(target: Any, items: Any) -> None:
    if type(target) is not list:
        _give_items(target, items)
        return
    target.extend(items)


def _add_items(target: Any, items: list[Any]) -> None:
    if type(target) is not set:
        _give_items(target, items)
        return
    target.update(map(_key, items))


def _give_items(target: object, items: Any) -> None:
    take_items = getattr(type(target), "take_items", None)
    if take_items is None:
        raise damaged(f"items for a {type(target).__name__}")
    take_items(target, items)


def _key(value: Any) -> Any:
    """What goes into a dict or a set in place of a value."""
    kind = type(value)
    if kind in (list, dict, set, bytearray):
        raise damaged(f"a {kind.__name__} as a key")
    if kind in (tuple, frozenset) or (kind is int and not -_MAX_INT_KEY < value < _MAX_INT_KEY):
        return OddKey(value)
    return value


def _decode(code: int, content: bytes) -> object:
    if code in (_SHORT_BINUNICODE, _BINUNICODE8):
        return content.decode()
    if code in (_LONG1, _LONG4):
        if len(content) > MAX_INT_BYTES:
            raise damaged(f"an integer of {len(content):,} bytes")
        return int.from_bytes(content, "little", signed=True)
    return bytearray(content) if code == _BYTEARRAY8 else content


def _read_line(data: bytes, start: int) -> tuple[str, int]:
    end = data.find(b"\n", start, start + _MAX_NAME_BYTES)
    if end < 0:
        if start + _MAX_NAME_BYTES > len(data):
            raise ends_too_early()
        raise damaged(f"a name of more than {_MAX_NAME_BYTES} bytes")
    return data[start:end].decode(), end + 1


def _find(find_global: Callable[[str, str], object], module: object, name: object) -> object:
    if type(module) is not str or type(name) is not str:
        raise damaged("a global whose name is not text")
    return find_global(module, name)
