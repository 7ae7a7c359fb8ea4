"""What is in files with thousands of arrays, kept on disk: describing them again takes as long as opening each."""

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

__all__ = ["MIN_ARRAYS", "KeptParts", "PackedText"]

MIN_ARRAYS = 2000
"""Arrays of a file from which on its contents are kept: describing them takes a tenth of a second or more."""

MIN_BYTES = 100  # of a file for each of its arrays: no header is shorter

FORMAT = 2
COLUMNS = ("numbers", "n_rows", "places", "offsets", "sizes")
HEAD = struct.Struct("<Q")


class PackedText(Sequence[str]):
    """Texts in one piece of memory, of which each takes 8 bytes and its letters.

    Args:
        texts: UTF-8, one after the other.
        ends: the end of each, shape ``(n,)``.
    """

    def __init__(self, texts: bytes, ends: IntArray) -> None:
        self.texts, self.ends = texts, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> PackedText:
        """Return texts as they are kept."""
        each = [text.encode(errors="surrogateescape") for text in texts]
        return cls(b"".join(each), np.cumsum([len(one) for one in each], dtype=np.int64))

    @classmethod
    def joined(cls, each: Sequence[PackedText]) -> PackedText:
        """Return several one after the other."""
        if len(each) == 1:
            return each[0]
        before = np.cumsum([0, *(len(one.texts) for one in each)]).tolist()
        ends = [one.ends + n for one, n in zip(each, before, strict=False)]
        return cls(b"".join([one.texts for one in each]), np.concatenate(ends))

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


class KnownParts(NamedTuple):
    """What was kept of a file.

    Attributes:
        stars: names of parts (see ``FoundParts``).
        arrays: the arrays, part by part.
        aliases: other names of parts (see ``FoundParts``).
    """

    stars: PackedText
    arrays: ArrayColumns
    aliases: dict[str, str]


@dataclass(frozen=True)
class KeptParts:
    """The kept contents of a file: names of parts, and what tells alike arrays apart.

    What they are like is not kept: one array of each kind is described again, and compared.

    Attributes:
        kept_at: where they are kept.
        meaning: all that they depend on: the file as it is, and what is asked of it.
    """

    kept_at: str
    meaning: str

    @classmethod
    def of(cls, path: str, guard: ChangeGuard, options: OpenOptions, asked: Any) -> KeptParts | None:
        """Return where the contents of a file are kept; None if they are not.

        Args:
            path: the file.
            guard: of the file.
            options: how it is opened.
            asked: the parts and arrays, as plain values.
        """
        files = options.files
        folder = kept_folder() if files.catalog_dir == "auto" else files.catalog_dir
        has_few = asked[0] is None or guard.n_bytes < MIN_ARRAYS * MIN_BYTES
        if folder is None or has_few or files.swmr or files.allow_external or files.verify is not None:
            return None
        which = [FORMAT, path, asked, files.trusted, files.min_integrity]
        name = hashlib.sha256(json.dumps(which).encode()).hexdigest()[:32]
        seen = [guard.device, guard.inode, guard.n_bytes, guard.mtime_ns, guard.seen_ns, file_identity(path, ())]
        return cls(os.path.join(os.path.expanduser(folder), f"{name}.catalog"), json.dumps([which, seen]))

    def read(self, describe: Describe, is_attribute: npt.NDArray[np.bool_]) -> KnownParts | None:
        """Return what was kept; None if nothing was, if it is damaged, or of another state of the file.

        Args:
            describe: describes arrays of which more is needed than was kept.
            is_attribute: for each array of a part whether it is an attribute, whose value is read again.

        Raises:
            H5Error: an array is refused.
        """
        try:
            data = read_kept(self.kept_at)
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
        kinds, firsts, which = np.unique(np.where(again, -1, numbers), return_index=True, return_inverse=True)
        for name, piece in zip(COLUMNS, pieces[2:], strict=True):
            getattr(arrays, name).frombytes(piece)
        found = []
        for kind, first in zip(kinds.tolist(), firsts.tolist(), strict=True):
            layout, number = describe(stars, first) if kind >= 0 else (None, -1)
            if layout is not None and (number is None or not arrays.has(first, layout)):
                return None
            found.append(number)
        arrays.numbers = array("i", np.array(found, dtype=np.int32)[which].tobytes())
        for one in np.flatnonzero(again).tolist():
            arrays.put(one, *describe(stars, one))
        return KnownParts(stars, arrays, aliases)

    def write(self, stars: PackedText, arrays: ArrayColumns, aliases: Mapping[str, str]) -> None:
        """Keep the contents; errors of the disk are ignored, and so are files that are described in no time."""
        if len(arrays.numbers) < MIN_ARRAYS:
            return
        pieces = [stars.texts, stars.ends.tobytes(), *(getattr(arrays, name).tobytes() for name in COLUMNS)]
        sizes = [len(piece) for piece in pieces]
        head = json.dumps({"meaning": self.meaning, "sizes": sizes, "aliases": dict(aliases)}).encode()
        with suppress(OSError):
            write_kept(self.kept_at, b"".join([HEAD.pack(len(head)), head, *pieces]))
