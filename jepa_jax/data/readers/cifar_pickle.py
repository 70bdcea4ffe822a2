"""Reads the pickles of CIFAR-10's python layout without unpickling: opcodes become plain values, nothing is called.

Only what those files need is known: dicts, lists, tuples, bytes, text, small integers, and arrays of bytes, which come
out as shape and content. A file can neither run code nor make numpy build an array from what it claims.
"""

import dataclasses
import math
import pickletools
from typing import Any

import numpy as np

MOST_BYTES = 64 << 20  # of a file; the official ones have 31 MB
MOST_OPCODES = 500_000  # the official ones have some 30,000

RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
ARRAY, DTYPE, ENCODE = "numpy ndarray", "numpy dtype", "_codecs encode"
BYTES_DTYPES = ("u1", "|u1", b"u1", b"|u1", "uint8", b"uint8")

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NUMBERS = ("BININT", "BININT1", "BININT2")
TEXTS = ("BINUNICODE", "SHORT_BINUNICODE")
BYTE_STRINGS = ("BINBYTES", "SHORT_BINBYTES")
OLD_STRINGS = ("BINSTRING", "SHORT_BINSTRING")  # bytes of Python 2
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NOTHING = ("PROTO", "FRAME")


class NotABatch(ValueError):
    """The bytes are no pickle of plain values and arrays of bytes."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A global that the pickle refers to."""

    text: str


@dataclasses.dataclass
class Call:
    """A call that the pickle asks for, with the state that it wants to set; it is never made."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_batch(data: bytes) -> tuple[np.ndarray, list[int]]:
    """Returns the array b"data" and the integers b"labels" of a pickled dict.

    Raises:
      NotABatch: the pickle has other things in it, is damaged or too large.
    """
    if len(data) > MOST_BYTES:
        raise NotABatch(f"{len(data):,} bytes, at most {MOST_BYTES:,} are read")
    try:
        content = _Machine(len(data)).run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        # pickletools raises several of them on damaged files, as do missing values on the stack.
        raise NotABatch(str(error) if isinstance(error, NotABatch) else f"damaged: {error}") from error
    if not isinstance(content, dict) or b"data" not in content or b"labels" not in content:
        raise NotABatch("no dict with data and labels")
    labels = content[b"labels"]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise NotABatch("labels are no list of integers")
    return _array(content[b"data"]), labels


def _array(value: Any) -> np.ndarray:
    """Returns the array that a call of numpy's `_reconstruct` stands for, if its claims fit its content."""
    if not isinstance(value, Call) or value.function not in RECONSTRUCT or not isinstance(value.state, tuple):
        raise NotABatch("data is no array")
    _, shape, dtype, fortran, content = value.state if len(value.state) == 5 else (None,) * 5
    if not _is_bytes(dtype) or fortran or not isinstance(content, bytes):
        raise NotABatch("data is no array of bytes in C order")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 4:
        raise NotABatch("data has no shape")
    if math.prod(shape) != len(content):
        raise NotABatch(f"data has shape {shape} and {len(content):,} bytes")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _is_bytes(dtype: Any) -> bool:
    named = dtype.arguments[0] if isinstance(dtype, Call) and dtype.function == DTYPE and dtype.arguments else None
    return isinstance(named, str | bytes) and named in BYTES_DTYPES


class _Machine:
    """The stack, marks and memo of a pickle."""

    def __init__(self, most_encoded: int):
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._left_to_encode = most_encoded  # a text may be encoded again and again

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > MOST_OPCODES:
                raise NotABatch(f"more than {MOST_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise NotABatch("no end")

    def _step(self, name: str, argument: Any) -> None:
        if name in NOTHING:
            return
        if name in CONSTANTS:
            self._stack.append(CONSTANTS[name])
        elif name in NUMBERS or name in TEXTS or name in BYTE_STRINGS:
            self._stack.append(argument)
        elif name in OLD_STRINGS:
            self._stack.append(argument.encode("latin-1"))
        elif name in TUPLES:
            self._stack.append(tuple(self._take(TUPLES[name])))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        else:
            self._step_of_containers(name, argument)

    def _step_of_containers(self, name: str, argument: Any) -> None:
        if name == "MARK":
            self._marks.append(self._stack)
            self._stack = []
        elif name == "TUPLE":
            items = self._since_mark()
            self._stack.append(tuple(items))
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            self._stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("APPEND", "APPENDS"):
            items = self._take(1) if name == "APPEND" else self._since_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._take(2) if name == "SETITEM" else self._since_mark()
            self._set(items)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._refer(argument if name == "GLOBAL" else " ".join(self._take(2)))
        elif name == "REDUCE":
            self._call(*self._take(2))
        elif name == "BUILD":
            [state] = self._take(1)
            self._top(Call).state = state
        else:
            raise NotABatch(f"opcode {name} is not allowed")

    def _take(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise NotABatch("damaged: a value is missing")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _top(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise NotABatch(f"damaged: no {kind.__name__} where one is needed")
        return self._stack[-1]

    def _set(self, items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values) or not all(isinstance(key, bytes) for key in keys):
            raise NotABatch("a dict has keys that are no bytes")
        self._top(dict).update(zip(keys, values, strict=True))

    def _refer(self, text: str) -> None:
        if text not in (*RECONSTRUCT, ARRAY, DTYPE, ENCODE):
            raise NotABatch(f"the pickle asks for {text.replace(' ', '.')[:100]}, which is not allowed")
        self._stack.append(Name(text))

    def _call(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise NotABatch("damaged: a call of what is no function")
        if function.text != ENCODE:
            self._stack.append(Call(function.text, arguments))
            return
        text, codec = arguments  # what Python 3 writes for bytes in an old pickle
        if not isinstance(text, str) or codec not in ("latin1", "latin-1") or len(text) > self._left_to_encode:
            raise NotABatch("text is not encoded as latin-1")
        self._left_to_encode -= len(text)
        self._stack.append(text.encode("latin-1"))
