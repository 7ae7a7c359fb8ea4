"""Contents of files with thousands of arrays, cached on disk: describing an array takes as long as opening it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..hdf5 import ArrayColumns, ArrayLayout, ChangeGuard, OpenOptions, file_identity
from ..kept_files import kept_folder, read_kept, write_kept
from ..types import IntArray
from .part_names import PartNames

__all__ = ["MIN_ARRAYS", "KeptParts", "PackedText", "PartsOfFile"]

MIN_ARRAYS = 2000
"""Contents of files with at least so many arrays are kept: describing them takes a tenth of a second or more."""

MIN_BYTES = 100  # of a file for each of its arrays: no header is shorter

FORMAT = 2
COLUMNS = ("numbers", "n_rows", "places", "offsets", "sizes")
HEAD = struct.Struct("<Q")


class PackedText(Sequence[str]):
    """Texts in one piece of memory: 8 bytes for each text, and its letters.

    Args:
        texts: UTF-8, one after the other.
        ends: the end of each, shape ``(n,)``.
    """

    def __init__(self, texts: bytes, ends: IntArray) -> None:
        self.texts, self.ends = texts, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> PackedText:
        """Pack texts."""
        encoded = [text.encode(errors="surrogateescape") for text in texts]
        return cls(b"".join(encoded), np.cumsum([len(text) for text in encoded], dtype=np.int64))

    @classmethod
    def joined(cls, pieces: Sequence[PackedText]) -> PackedText:
        """Return the texts of all pieces, one after the other."""
        if len(pieces) == 1:
            return pieces[0]
        starts = np.cumsum([0, *(len(piece.texts) for piece in pieces)]).tolist()
        ends = [piece.ends + start for piece, start in zip(pieces, starts, strict=False)]
        return cls(b"".join([piece.texts for piece in pieces]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        number = range(len(self))[number]
        start = int(self.ends[number - 1]) if number else 0
        return self.texts[start : int(self.ends[number])].decode(errors="surrogateescape")


Describe = Callable[[Sequence[str], int], tuple[ArrayLayout, int | None]]
"""Describes an array, by its number among all of the file, from the names of the parts."""


class PartsOfFile(NamedTuple):
    """The parts of a file, and their arrays.

    Attributes:
        stars: the text that the ``*`` stands for in each part.
        arrays: the arrays, part by part.
        names: of parts and arrays.
        others: guards of other files that hold rows of arrays.
        aliases: further names of parts: their text for the ``*``, and the one in ``stars``.
        n_missing: number of parts that lack an array and were left out.
    """

    stars: PackedText
    arrays: ArrayColumns
    names: PartNames
    others: tuple[ChangeGuard, ...] = ()
    aliases: Mapping[str, str] = {}
    n_missing: int = 0


@dataclass(frozen=True)
class KeptParts:
    """The kept contents of a file: names of parts, and the numbers that tell alike arrays apart.

    Templates of alike arrays are not kept: one array of each kind is described again, and compared.

    Attributes:
        path: the file on disk that keeps them.
        names: of parts and arrays.
        meaning: everything that they depend on: the state of the file, and the request.
    """

    path: str
    names: PartNames
    meaning: str

    @classmethod
    def of(cls, path: str, guard: ChangeGuard, options: OpenOptions, names: PartNames) -> KeptParts | None:
        """Return the kept contents of a file, which may be missing on disk; None if they are never kept.

        Args:
            path: the file.
            guard: of the file.
            options: how it is opened.
            names: of the requested parts and arrays.
        """
        files, request = options.files, (names.pattern, names.is_group, names.keys)
        folder = kept_folder() if files.catalog_dir == "auto" else files.catalog_dir
        has_few = names.pattern is None or guard.n_bytes < MIN_ARRAYS * MIN_BYTES
        if folder is None or has_few or files.swmr or files.allow_external or files.verify is not None:
            return None
        identity = [FORMAT, path, request, files.trusted, files.min_integrity]
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        content = file_identity(path, (), status=guard.object_status)
        state = [guard.device, guard.inode, guard.n_bytes, guard.mtime_ns, guard.seen_ns, content]
        catalog_path = os.path.join(os.path.expanduser(folder), f"{name}.catalog")
        return cls(catalog_path, names, json.dumps([identity, state]))

    def read(self, describe: Describe, is_attribute: npt.NDArray[np.bool_]) -> PartsOfFile | None:
        """Return the kept parts; None if there are none, if they are damaged, or of another state of the file.

        Args:
            describe: describes arrays that are not kept in full.
            is_attribute: for each array of a part whether it is an attribute. Attributes are always read again.

        Raises:
            H5Error: an array is refused.
        """
        try:
            data = read_kept(self.path)
            if data is None:
                return None
            at = HEAD.size + HEAD.unpack_from(data)[0]
            head = json.loads(data[HEAD.size : at])
            if head["meaning"] != self.meaning:
                return None
            pieces, aliases = [], dict(head["aliases"])
            for n_bytes in head["sizes"]:
                pieces.append(data[at : at + n_bytes])
                at += n_bytes
        except (OSError, ValueError, KeyError, struct.error):
            return None
        stars = PackedText(pieces[0], np.frombuffer(pieces[1], np.int64))
        arrays, numbers = ArrayColumns(), np.frombuffer(pieces[2], np.int32)
        again = np.tile(is_attribute, len(stars)) | (numbers < 0)
        kinds, firsts, kind_numbers = np.unique(np.where(again, -1, numbers), return_index=True, return_inverse=True)
        for name, piece in zip(COLUMNS, pieces[2:], strict=True):
            getattr(arrays, name).frombytes(piece)
        templates = []
        for kind, first in zip(kinds.tolist(), firsts.tolist(), strict=True):
            layout, number = describe(stars, first) if kind >= 0 else (None, -1)
            if layout is not None and (number is None or not arrays.has(first, layout)):
                return None
            templates.append(number)
        arrays.numbers = array("i", np.array(templates, dtype=np.int32)[kind_numbers].tobytes())
        for number in np.flatnonzero(again).tolist():
            arrays.put(number, *describe(stars, number))
        return PartsOfFile(stars, arrays, self.names, aliases=aliases)

    def write(self, stars: PackedText, arrays: ArrayColumns, aliases: Mapping[str, str]) -> None:
        """Keep the contents, if describing them takes long. Errors of the disk are ignored."""
        if len(arrays.numbers) < MIN_ARRAYS:
            return
        pieces = [stars.texts, stars.ends.tobytes(), *(getattr(arrays, name).tobytes() for name in COLUMNS)]
        sizes = [len(piece) for piece in pieces]
        head = json.dumps({"meaning": self.meaning, "sizes": sizes, "aliases": dict(aliases)}).encode()
        with suppress(OSError):
            write_kept(self.path, b"".join([HEAD.pack(len(head)), head, *pieces]))
