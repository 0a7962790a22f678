"""Single tensors that torch.save appended to a file, one after the other: chunks of a ``.distcp``.

There can be a hundred thousand of them in a checkpoint, and all that differs between most are
checksums. So an archive is read in full once for each form; whether another has the same form is
found by comparing bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streammerge.errors import CorruptFileError, UnsupportedError
from streammerge.torchfile import HAS_DESCRIPTOR, Entry, Span, read_zip
from streammerge.unpickler import StridedTensor, brief

_MAX_FORMS = 1024  # about 3 KB each
_MAX_FORM_BYTES = 16 << 10
# Members that may follow the blob, as what they hold does not matter.
_WITHOUT_MEANING = frozenset({b"version", b".data/serialization_id"})
_CRC_SIZE = 4
_CRC_IN_DIRECTORY = 16  # where in the entry of a member its CRC-32 stands
_CRC_IN_HEADER = 14  # and where in its local header


class StoredTensor(NamedTuple):
    """A tensor and the blob that it is a view on.

    Attributes:
        tensor: as it stands in the pickle.
        header_offset, data_offset: of the blob, from the start of the file.
        size: bytes of the blob.
        crc: CRC-32 of the blob; 0 where the writer stored none.
        name: CRC-32 of the name of its member.
    """

    tensor: StridedTensor
    header_offset: int
    data_offset: int
    size: int
    crc: int
    name: int


class TensorReader:
    """Reads the metadata of tensors. Keeps the forms of those it has read."""

    def __init__(self) -> None:
        self._heads: dict[int, set[tuple[int, int | None]]] = {}
        self._forms: dict[tuple[int, bytes], _Form] = {}

    def read(self, span: Span) -> StoredTensor:
        """Read where the bytes of a tensor lie and how.

        Args:
            span: the archive.

        Raises:
            SourceError: it is damaged, or holds something else than one tensor.
        """
        for length, crc_at in self._heads.get(span.size, ()):
            head = span.read(0, length)
            form = self._forms.get((span.size, _blank(head, crc_at)))
            found = None if form is None else form.match(span, head)
            if found is not None:
                return found
        read, new = _read_in_full(span)
        if new is not None:
            if len(self._forms) == _MAX_FORMS:
                self._forms.clear()
                self._heads.clear()
            self._heads.setdefault(span.size, set()).add((len(new.head), new.head_crc))
            self._forms[span.size, new.head] = new
        return read


@dataclass(frozen=True, slots=True)
class _Form:
    """An archive with room for other checksums. Offsets are from its start.

    Attributes:
        head: the bytes before the blob, with zeros for `head_crc`.
        tail: those of the directory and its end, with zeros for `tail_crcs`.
        head_crc: where in the head the CRC-32 of the blob stands, if it does.
        tail_crcs: where in the tail those of the blob and the members after it stand.
        model: what is the same for all archives of this form.
    """

    head: bytes
    tail: bytes
    tail_at: int
    head_crc: int | None
    tail_crcs: tuple[int, ...]
    model: StoredTensor

    def match(self, span: Span, head: bytes) -> StoredTensor | None:
        """The tensor in an archive with the head of this form; None if the rest has another."""
        tail = span.read(self.tail_at, len(self.tail))
        if _blank(tail, *self.tail_crcs) != self.tail:
            return None
        crc = tail[self.tail_crcs[0] :][:_CRC_SIZE]
        if self.head_crc is not None and head[self.head_crc :][:_CRC_SIZE] != crc:
            return None
        return self.model._replace(
            header_offset=span.start + self.model.header_offset,
            data_offset=span.start + self.model.data_offset,
            crc=int.from_bytes(crc, "little"),
        )


def _read_in_full(span: Span) -> tuple[StoredTensor, _Form | None]:
    if span.read(0, 4) != b"PK\x03\x04":
        raise CorruptFileError("no archive of torch.save starts there")
    archive, unpickled = read_zip(span)
    tensor = unpickled.value
    if not isinstance(tensor, StridedTensor):
        raise UnsupportedError(f"holds {brief(tensor)}, expected a plain tensor")
    storage = tensor.storage
    blob = archive.blob(storage.key, storage)
    data_offset = archive.data_offset(blob)
    archive.check_inside(blob, data_offset)
    found = StoredTensor(
        tensor, blob.header_offset, data_offset, blob.size, blob.crc, zlib.crc32(blob.name)
    )
    behind = [e for e in archive.entries.values() if e.header_offset > data_offset]
    form = None
    if {entry.name.removeprefix(archive.prefix) for entry in behind} <= _WITHOUT_MEANING:
        form = _form_of(span, found, archive.directory_offset, blob, behind)
    moved = found._replace(
        header_offset=span.start + blob.header_offset, data_offset=span.start + data_offset
    )
    return moved, form


def _form_of(
    span: Span, model: StoredTensor, tail_at: int, blob: Entry, behind: Sequence[Entry]
) -> _Form | None:
    """The form of an archive; None if it is too long to keep."""
    if max(model.data_offset, span.size - tail_at) > _MAX_FORM_BYTES:
        return None
    head_crc = None
    if not blob.flags & HAS_DESCRIPTOR:
        head_crc = blob.header_offset + _CRC_IN_HEADER
    tail_crcs = tuple(entry.at + _CRC_IN_DIRECTORY - tail_at for entry in (blob, *behind))
    head = span.read(0, model.data_offset)
    tail = span.read(tail_at, span.size - tail_at)
    return _Form(
        _blank(head, head_crc), _blank(tail, *tail_crcs), tail_at, head_crc, tail_crcs, model
    )


def _blank(data: bytes, *places: int | None) -> bytes:
    """Bytes with zeros for the CRC-32 at some places."""
    blanked = bytearray(data)
    for place in places:
        if place is not None:
            blanked[place : place + _CRC_SIZE] = bytes(_CRC_SIZE)
    return bytes(blanked)
