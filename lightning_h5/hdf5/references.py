"""Arrays of references to other arrays of their file, which are found by name then: cells of MATLAB, and of NWB."""

from __future__ import annotations

from typing import Any

import h5py

from ..errors import H5CorruptError, H5ValueError
from ..options import FileOptions
from .layout import ArrayLayout
from .links import find_array
from .open import FAULTS, translate_h5py_errors
from .structures import is_empty_matlab, is_text_of_matlab

__all__ = ["MAX_TEXT", "holds_regions", "is_matlab_text", "is_references", "referenced_arrays", "value_of_cell"]

FEW = 1 << 16  # references that are read however small the file
MIN_BYTES = 64  # of a file per array: a header and a link take at least as many

MAX_TEXT = 1 << 20
"""Characters of a cell that are read, at most."""


def is_references(layout: ArrayLayout) -> bool:
    """Return whether an array holds references to objects of its file."""
    return h5py.check_ref_dtype(layout.stored) is h5py.Reference


def holds_regions(layout: ArrayLayout) -> bool:
    """Return whether an array holds references to regions of arrays."""
    return h5py.check_ref_dtype(layout.stored) is h5py.RegionReference


def referenced_arrays(file: Any, path: str, key: str, files: FileOptions, *, takes_empty: bool = False) -> list[str]:
    """Return the names of the arrays that an array refers to, in its order. Opens each: about 50 microseconds.

    Names, as those that a user gives, are checked when their arrays are looked at.

    Args:
        file: the open file.
        path: its path.
        key: the array of references.
        files: whether other files and large sizes are accepted.
        takes_empty: accept empty arrays of MATLAB.

    Raises:
        H5ValueError: a reference is null, or to something else than an array with values; or they are of a kind that
            makes no list of arrays.
        H5CorruptError: a reference leads nowhere.
    """
    handle = find_array(file, key, files)
    array, n_file = handle.array, int(h5py.h5i.get_file_id(file.id).get_filesize())
    if handle.is_external or array.is_virtual:
        raise H5ValueError(
            f"{key!r} in {path!r} holds references that are stored elsewhere, by a virtual array or in another file; "
            "they refer to objects of the file that stores them. Pass this file, and name its array of references."
        )
    if max(array.shape) < array.size or not array.size:
        raise H5ValueError(
            f"{key!r} in {path!r} holds references and has the shape {array.shape}. Name an array that is a list of "
            "references: of shape (n,), (1, n) or (n, 1), with one or more."
        )
    if array.size > max(FEW, n_file // MIN_BYTES):
        raise H5CorruptError(
            f"{key!r} in {path!r} declares {array.size:,} references, more than a file of {n_file:,} bytes has arrays. "
            "The file is damaged, or was crafted to exhaust memory; copy it again."
        )
    with translate_h5py_errors(path, repr(key)):
        references = array[()].reshape(-1).tolist()
    names = _Names(file)
    return [
        _name_of_reference(reference, names, f"{key!r} in {path!r} refers at index {at} to", takes_empty=takes_empty)
        for at, reference in enumerate(references)
    ]


def value_of_cell(file: Any, name: str, files: FileOptions) -> Any:
    """Return the text or the number that an array of an open file has, as a cell of MATLAB; None for other values.

    Args:
        file: the open file.
        name: of the array.
        files: whether other files and large sizes are accepted.
    """
    is_text, array_id = is_matlab_text(file, name), h5py.h5d.open(file.id, name.encode(errors="surrogateescape"))
    if is_empty_matlab(array_id):
        return "" if is_text else None
    array = find_array(file, name, files).array
    if array.size > (MAX_TEXT if is_text else 1) or array.dtype.kind not in ("u" if is_text else "biuf"):
        return None
    if is_text and max(array.shape) < array.size:  # several lines
        return None
    with translate_h5py_errors(file.filename, repr(name)):
        values = array[()].reshape(-1)
    if is_text:
        return values.astype("<u2").tobytes().decode("utf-16-le", "replace")
    return values[0] if len(values) else None


def is_matlab_text(file: Any, name: str) -> bool:
    """Return whether an array of an open file has the characters of a text of MATLAB."""
    with translate_h5py_errors(file.filename, repr(name)):
        return is_text_of_matlab(h5py.h5d.open(file.id, name.encode(errors="surrogateescape")))


class _Names:
    """Finds names of objects by their addresses.

    HDF5 itself walks through the links of the file for each one: it is asked for the first object of a group only.

    Args:
        file: the open file.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self._names: dict[tuple[int, int], str] = {}

    def of(self, array_id: Any, reference: Any) -> str | None:
        """Return the name of an open array; None if no group has it."""
        address = h5py.h5g.get_objinfo(array_id).objno
        if address not in self._names:
            name = h5py.h5r.get_name(reference, self.file.id)
            if name is None:
                return None
            group_name = name.rpartition(b"/")[0]
            group = h5py.h5g.open(self.file.id, group_name or b"/")
            for member in group:
                info = h5py.h5g.get_objinfo(group, member, follow_link=False)
                if info.type == h5py.h5g.DATASET:
                    self._names[info.objno] = f"{_decoded_name(group_name)}/{_decoded_name(member)}".strip("/")
        return self._names.get(address)


def _name_of_reference(reference: Any, names: _Names, subject: str, *, takes_empty: bool) -> str:
    if not reference:
        raise H5ValueError(f"{subject} nothing: the reference is null. Write an array for each index.")
    try:
        kind = h5py.h5r.get_obj_type(reference, names.file.id)
        if kind != h5py.h5g.DATASET:
            kind_text = "a group (a structure, or a sparse matrix)" if kind == h5py.h5g.GROUP else "a named datatype"
            raise H5ValueError(f"{subject} {kind_text}, not an array. Write arrays of numbers or text.")
        array_id = h5py.h5r.dereference(reference, names.file.id)
        name = names.of(array_id, reference)
        if name is None:
            raise H5ValueError(f"{subject} an array without a name, which no group has. Write it into a group.")
        if array_id.get_type().get_class() == h5py.h5t.REFERENCE:
            raise H5ValueError(f"{subject} {name!r}, which holds references itself. Name that array instead.")
        if not takes_empty and is_empty_matlab(array_id):
            raise H5ValueError(
                f"{subject} {name!r}, an empty array of MATLAB, which stores its shape instead of values."
            )
    except H5ValueError as error:
        raise error.with_traceback(None) from None
    except FAULTS as error:
        raise H5CorruptError(
            f"{subject} no object of the file: {error}. The file is damaged; copy it again."
        ) from error
    return name


def _decoded_name(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
