"""Messages between silos about counts, as bytes. No network code.

    Enquiry          asker → owner   for the catalogue of a field, or for some of its published cells
    Catalogue        owner → asker   which documents there are, how long, and how counts are released
    Published        owner → asker   the noisy cells of a batch of documents of a field
    CountsQuestion   asker → owner   cells, real and decoy
    CountsAnswer     owner → asker   their noisy values in all documents, bound to the question
    Refusal          owner → asker   nothing is released, and why in general words

A message is `ISTH`, a version, a kind, the length of the body, the body, and a checksum. Anything else (cut,
longer, of another kind, with a count that does not fit) is a ProtocolError, whose text names the broken rule
and never a term, an id or a count.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import IntArray
from isthmus.errors import ProtocolError
from isthmus.tables import Unpacker

VERSION = 1
LARGEST = 1 << 30
"""Bytes of the largest message that is made or accepted, frame and checksum included."""
MOST_DOCUMENTS, MOST_WORDS = 1 << 24, 1 << 14
"""The most documents of a catalogue and the most words, decoys included, of a question."""
MOST_VALUES = 1 << 27
"""The most values of an answer."""
MOST_UNPACKED = 1 << 31
"""Bytes that a message may unpack to: the most values of an answer, with the place of each."""
A_NAME = 100
"""Bytes of a document's name in memory, in addition to its characters."""

_FRAME = struct.Struct("<4sBBI")
_MAGIC, _CHECK = b"ISTH", 8


@dataclass(frozen=True, slots=True)
class Terms:
    """How the counts of a field are released: what a reader needs of the mechanism, all of it public."""

    mechanism: str
    field: str
    epsilon: float
    rows: int
    width: int
    epoch: int


@dataclass(frozen=True, eq=False)
class CountsMessage:
    """A kind of message; subclasses encode and decode its body."""

    kind: ClassVar[int]

    def encode(self) -> bytes:
        """The message as bytes."""
        body = self._body()
        if _FRAME.size + len(body) + _CHECK > LARGEST:
            raise ProtocolError("the message is too large (release fewer documents at once)")
        framed = _FRAME.pack(_MAGIC, VERSION, self.kind, len(body)) + body
        return framed + hashlib.blake2b(framed, digest_size=_CHECK).digest()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a message of this kind. Raises ProtocolError for any other bytes."""
        if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) < _FRAME.size + _CHECK:
            raise ProtocolError("not a message, or one that was cut")
        if len(data) > LARGEST:
            raise ProtocolError("the message is too large")
        framed, check = memoryview(data)[:-_CHECK], bytes(data[-_CHECK:])
        magic, version, kind, size = _FRAME.unpack_from(framed)
        if magic != _MAGIC or size != len(framed) - _FRAME.size:
            raise ProtocolError("not a message, or one that was cut or added to")
        if version != VERSION or kind != cls.kind:
            raise ProtocolError("a message of another version or kind than expected")
        if hashlib.blake2b(framed, digest_size=_CHECK).digest() != check:
            raise ProtocolError("a message that was damaged on its way")
        body = _Cursor(framed[_FRAME.size :])
        try:
            message = cls._read(body)
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError("a message whose body is not what its kind says") from None
        body.end()
        return message

    def _body(self) -> bytes:
        raise NotImplementedError

    @classmethod
    def _read(cls, body: _Cursor) -> Self:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Enquiry(CountsMessage):
    """Asks for the catalogue of a field or, if `first` is not negative, for its cells from document `first`
    on."""

    kind = 5

    field: str
    first: int = -1

    def _body(self) -> bytes:
        return _spell(self.field) + struct.pack("<i", self.first)

    @classmethod
    def _read(cls, body: _Cursor) -> Self:
        return cls(body.text(), body.number("<i", MOST_DOCUMENTS))


@dataclass(frozen=True, eq=False)
class Refusal(CountsMessage):
    """Nothing is released; `reason` names the kind of rule that forbids it, and no term, id or count."""

    kind = 6

    reason: str

    def _body(self) -> bytes:
        return _spell(self.reason)

    @classmethod
    def _read(cls, body: _Cursor) -> Self:
        return cls(body.text())


@dataclass(frozen=True, eq=False)
class Catalogue(CountsMessage):
    """The documents of a silo in their order, with the public length of each in the field."""

    kind = 1

    terms: Terms
    documents: tuple[str, ...]
    lengths: IntArray

    def _body(self) -> bytes:
        names = [name.encode() for name in self.documents]
        sizes = np.array([len(name) for name in names], dtype="<u2").tobytes()
        lengths = self.lengths.astype("<u4").tobytes()
        return _spell_terms(self.terms) + struct.pack("<I", len(names)) + sizes + lengths + b"".join(names)

    @classmethod
    def _read(cls, body: _Cursor) -> Self:
        terms = _read_terms(body)
        count = body.number("<I", MOST_DOCUMENTS)
        sizes, lengths = body.array("<u2", count), body.array("<u4", count)
        body.unpacker.spend(A_NAME * count)
        ends = np.cumsum(sizes, dtype=np.int64)
        text = body.take(int(ends[-1]) if count else 0)
        spans = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
        names = tuple(str(text[start:end], "utf-8") for start, end in spans)
        if len(set(names)) != count:
            raise ProtocolError("a catalogue that lists a document twice")
        return cls(terms, names, lengths.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Published(CountsMessage):
    """The noisy cells of some documents of a catalogue, from document `first` on: the `values` that are not
    zero, at `places` counted document by document and cell by cell."""

    kind = 2

    terms: Terms
    first: int
    documents: int
    places: IntArray
    values: NDArray[np.int32]

    def _body(self) -> bytes:
        head = _spell_terms(self.terms) + struct.pack("<II", self.first, self.documents)
        return head + pack(self.places, self.values, self.documents * self.terms.rows * self.terms.width)

    @classmethod
    def _read(cls, body: _Cursor) -> Self:
        terms = _read_terms(body)
        first, documents = body.number("<I", MOST_DOCUMENTS), body.number("<I", MOST_DOCUMENTS)
        return cls(terms, first, documents, *unpack(body, documents * terms.rows * terms.width))


@dataclass(frozen=True, eq=False)
class CountsQuestion(CountsMessage):
    """For every word, real or decoy, its column in each row, of shape (words, rows).

    Where the mechanism needs signs, column + width stands for the column with a negative sign. `number`
    increases with every question of an asker, so that a repeated question is recognised.
    """

    kind = 3

    terms: Terms
    number: int
    columns: NDArray[np.uint32]

    def _body(self) -> bytes:
        head = _spell_terms(self.terms) + struct.pack("<QH", self.number, len(self.columns))
        return head + self.columns.astype("<u4").tobytes()

    @classmethod
    def _read(cls, body: _Cursor) -> Self:
        terms = _read_terms(body)
        number = body.number("<Q", 1 << 64)
        words = body.number("<H", MOST_WORDS)
        columns = body.array("<u4", words * terms.rows).reshape(words, terms.rows)
        if not words or (columns >= 2 * terms.width).any():
            raise ProtocolError("a question about no word, or about a column that does not exist")
        return cls(terms, number, columns.astype(np.uint32))

    def digest(self) -> bytes:
        """The digest of the question, which its answer must name."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class CountsAnswer(CountsMessage):
    """The values for a question, of shape (words, parts, documents): integers sparsely coded, or reals.

    `places` is None for reals. No array of the full shape is allocated before the shape has been checked.
    """

    kind = 4

    question: bytes
    shape: tuple[int, int, int]
    places: IntArray | None
    values: NDArray[Any]

    @classmethod
    def of(cls, question: bytes, table: NDArray[Any]) -> CountsAnswer:
        """The answer with the values of this table."""
        flat = table.ravel()
        words, parts, documents = table.shape
        if table.dtype.kind == "f":
            return cls(question, (words, parts, documents), None, flat)
        places = np.flatnonzero(flat)
        return cls(question, (words, parts, documents), places, flat[places])

    def table(self) -> NDArray[Any]:
        """All values, zeros included."""
        if self.places is None:
            return self.values.reshape(self.shape)
        flat = np.zeros(int(np.prod(self.shape)), dtype=np.int32)
        flat[self.places] = self.values
        return flat.reshape(self.shape)

    def _body(self) -> bytes:
        head = self.question + struct.pack("<?HBI", self.places is None, *self.shape)
        if self.places is None:
            return head + self.values.astype("<f8").tobytes()
        return head + pack(self.places, self.values, int(np.prod(self.shape)))

    @classmethod
    def _read(cls, body: _Cursor) -> Self:
        question = bytes(body.take(16))
        real = bool(body.number("<B", 2))
        shape = body.number("<H", MOST_WORDS), body.number("<B", 256), body.number("<I", MOST_DOCUMENTS)
        size = shape[0] * shape[1] * shape[2]
        if size > MOST_VALUES:
            raise ProtocolError("an answer of more values than are answered at once")
        if not real:
            return cls(question, shape, *unpack(body, size))
        values = body.array("<f8", size)
        if not np.isfinite(values).all():
            raise ProtocolError("an answer with a value that is no number")
        return cls(question, shape, None, values)


def pack(places: IntArray, values: NDArray[Any], size: int) -> bytes:
    """Encode the integers that are not zero, at `places`, as gaps and values of one byte each with escapes.

    If more than half of the `size` integers are not zero, encode all as one byte each without gaps.
    """
    dense = 2 * len(places) > size
    dense_values = np.asarray(values, dtype=np.int64)
    gaps = np.diff(places, prepend=-1) - 1
    if dense:
        dense_values = np.zeros(size, dtype=np.int64)
        dense_values[places] = values
        gaps = np.empty(0, dtype=np.int64)
    if np.abs(dense_values).max(initial=0) > np.iinfo(np.int32).max:
        raise ProtocolError("a value is beyond 32 bits")
    wide, far = np.abs(dense_values) > 127, gaps >= 255
    head = struct.pack("<?III", dense, len(dense_values), int(far.sum()), int(wide.sum()))
    parts = (
        np.where(far, 255, gaps).astype(np.uint8),
        np.where(wide, -128, dense_values).astype(np.int8),
        gaps[far].astype("<u4"),
        dense_values[wide].astype("<i4"),
    )
    return head + b"".join(part.tobytes() for part in parts)


def unpack(body: _Cursor, size: int) -> tuple[IntArray, NDArray[np.int32]]:
    """Decode the places and values of `size` packed integers. Raises ProtocolError where they do not fit."""
    dense = bool(body.number("<B", 2))
    count, far_count, wide_count = (body.number("<I", size + 1) for _ in range(3))
    gaps, small = body.array("<u1", 0 if dense else count), body.array("<i1", count)
    far, wide = gaps == 255, small == -128
    fits = int(far.sum()) == far_count and int(wide.sum()) == wide_count and not (dense and count != size)
    if not fits:
        raise ProtocolError("packed values that do not fit their message")
    filled = int(np.count_nonzero(small)) if dense else count
    body.unpacker.spend(filled * (np.dtype(np.int64).itemsize + np.dtype(np.int32).itemsize))
    if dense:
        places = np.flatnonzero(small)
        small, wide = small[places], wide[places]
    else:
        places = gaps.astype(np.int64)
        places[far] = body.array("<u4", far_count)
        places += 1
        np.cumsum(places, out=places)
        places -= 1
    values = small.astype(np.int32)
    values[wide] = body.array("<i4", wide_count)
    if len(places) and places[-1] >= size:
        raise ProtocolError("packed values that do not fit their message")
    return places, values


class _Cursor:
    """Reads a body from its beginning to its end, and no further; all arrays share one limit of bytes."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0
        self.unpacker = Unpacker(MOST_UNPACKED)

    def take(self, size: int) -> memoryview:
        if size < 0 or size > len(self._data) - self._at:
            raise ProtocolError("a message whose body is too short")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, form: str, below: int) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        if value >= below:
            raise ProtocolError("a message with a number out of range")
        return int(value)

    def array(self, form: str, count: int) -> NDArray[Any]:
        size = count * np.dtype(form).itemsize
        self.unpacker.spend(size)
        return np.frombuffer(self.take(size), dtype=form).copy()

    def text(self) -> str:
        return str(self.take(self.number("<B", 256)), "utf-8")

    def end(self) -> None:
        if self._at != len(self._data):
            raise ProtocolError("a message whose body is too long")


def kind_of(data: bytes) -> int:
    """The kind of message that bytes claim to be; -1 if they are no message."""
    return data[5] if len(data) > _FRAME.size and data[:4] == _MAGIC else -1


def _spell(word: str) -> bytes:
    data = word.encode()
    if len(data) > 255:
        raise ProtocolError("a name is too long for a message")
    return struct.pack("<B", len(data)) + data


def _spell_terms(terms: Terms) -> bytes:
    spelled = _spell(terms.mechanism) + _spell(terms.field)
    return spelled + struct.pack("<dBII", terms.epsilon, terms.rows, terms.width, terms.epoch)


def _read_terms(body: _Cursor) -> Terms:
    mechanism, field = body.text(), body.text()
    epsilon, rows, width, epoch = struct.unpack("<dBII", body.take(struct.calcsize("<dBII")))
    if not epsilon > 0 or rows < 1 or not 2 <= width < 1 << 24:
        raise ProtocolError("a message with terms of release that make no sense")
    return Terms(mechanism, field, epsilon, rows, width, epoch)
