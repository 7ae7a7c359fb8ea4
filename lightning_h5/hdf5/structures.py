"""Structures that other software stores in a file beside its data: descriptions, and rules to recognize them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

import h5py
import numpy as np

from .open import FAULTS

__all__ = [
    "AXIS",
    "BIOM_MATRICES",
    "CELLS",
    "COMPLEX_MEMBERS",
    "COORDINATES",
    "DIMENSION_SCALE",
    "FIELD_GROUPS",
    "INDEX_PREFIX",
    "MATLAB_EMPTY",
    "MATLAB_TEXT",
    "NO_COORDINATE",
    "SPARSE_PARTS",
    "WEIGHTS",
    "axes_of",
    "biom_shape",
    "field_groups_among",
    "is_empty_matlab",
    "is_in_index",
    "is_placeholder",
    "is_private_group",
    "is_text_of_matlab",
    "matrices_among",
    "reading_of",
    "software_of",
    "structure_of",
]

SPARSE_PARTS = (("data", "indices", "indptr"), ("data", "ir", "jc"))
"""Arrays of a group that is a sparse matrix, as named by AnnData, 10x Genomics and SciPy, and by MATLAB."""

FIELD_GROUPS: dict[tuple[str, ...], str] = {
    **dict.fromkeys(SPARSE_PARTS, "a sparse matrix"),
    ("codes", "categories"): "a column of categories",
}
"""Groups that are one field, by the names of their arrays."""

BIOM_MATRICES = ("observation/matrix", "sample/matrix")
"""The two matrices of a BIOM table, the second one transposed."""

COMPLEX_MEMBERS = (("real", "imag"), ("r", "i"))
"""Members of tables that are complex numbers, as MATLAB and other programs name them."""

MATLAB_EMPTY = b"MATLAB_empty"
"""The attribute of MATLAB's ``[]``."""

MAX_ROOT_NAMES = 8  # maximum number of names to check for a mark of MATLAB

NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"

NO_COORDINATE = "_nc4_non_coord_"
"""Prefix of netCDF to the name of a variable that is named like a dimension and is no coordinate of it."""

INDEX_PREFIX = "_i_"
"""PyTables' name for the group with the index of a table."""

DIMENSION_SCALE = "a dimension scale"
WEIGHTS = "weights of a Keras model"
AXIS = "an axis of NXdata"
CELLS = "contents of cells of MATLAB"
MATLAB_TEXT = "text of MATLAB"


class _Attributes:
    """The attributes of a low-level group or array.

    Args:
        item: the group or array.
    """

    def __init__(self, item: Any) -> None:
        self._item = item
        self._values: dict[bytes, Any] = {}

    def has(self, *names: bytes) -> bool:
        """Return whether the object has all of the named attributes."""
        try:
            return all(h5py.h5a.exists(self._item, name) for name in names)
        except FAULTS:
            return False

    def value(self, name: bytes, default: Any) -> Any:
        """Return an attribute, which is read once; the default if it is missing or cannot be read."""
        if name not in self._values:
            self._values[name] = self._read(name)
        value = self._values[name]
        return default if value is None else value

    def text(self, name: bytes) -> bytes:
        """Return the text of an attribute; empty if it is not text."""
        value = self.value(name, b"")
        if isinstance(value, str):
            return value.encode(errors="replace")
        return bytes(value) if isinstance(value, bytes) else b""

    def _read(self, name: bytes) -> Any:
        try:
            if not h5py.h5a.exists(self._item, name):
                return None
            owner = h5py.Group if isinstance(self._item, h5py.h5g.GroupID) else h5py.Dataset
            return owner(self._item).attrs[name.decode()]
        except FAULTS:
            return None


class Structure(NamedTuple):
    """A kind of structure: one rule.

    Attributes:
        what: a description in words.
        is_group: whether a group is marked, and everything in it belongs to the structure.
        marks: returns whether an object has this structure, from its attributes and its name in its group.
        reading: how its values are used, or the reason why they are not used for training.
        is_coordinate: whether users may name its values, although they are neither input nor target.
    """

    what: str
    is_group: bool
    marks: Callable[[_Attributes, str], bool]
    reading: str
    is_coordinate: bool = False


def structure_of(item: Any, name: str) -> str | None:
    """Return the structure of an open group or array, in words; None for data.

    Args:
        item: h5py's low-level group or array.
        name: its name in its group.
    """
    is_group = isinstance(item, h5py.h5g.GroupID)
    attributes = _Attributes(item)
    return next(
        (s.what for s in STRUCTURES if s.is_group == is_group and s.marks(attributes, name)),
        None,
    )


def is_empty_matlab(array_id: Any) -> bool:
    """Return whether an array is MATLAB's ``[]``, which stores its sizes in place of values."""
    return bool(np.any(_Attributes(array_id).value(MATLAB_EMPTY, 0)))


def is_text_of_matlab(array_id: Any) -> bool:
    """Return whether an array has the characters of a text of MATLAB, which may be empty."""
    return _is_text_of_matlab(_Attributes(array_id), "")


def is_placeholder(array_id: Any) -> bool:
    """Return whether an array stands for a dimension of netCDF without values."""
    return _is_placeholder(_Attributes(array_id), "")


def matrices_among(names: Collection[str]) -> dict[str, str]:
    """Return the groups of some arrays that are sparse matrices, and the array of each with the starts of its rows."""
    name_set = set(names)
    matrices = {}
    for *members, starts in SPARSE_PARTS:
        for name in names:
            group, _, last = name.rpartition("/")
            if last == starts and group and {f"{group}/{member}" for member in members} <= name_set:
                matrices[group] = name
    return matrices


def field_groups_among(names: Collection[str]) -> dict[str, str]:
    """Return the groups of some arrays that are one field each, with a description in words."""
    name_set = set(names)
    return {
        group: what
        for members, what in FIELD_GROUPS.items()
        for group in dict.fromkeys(name.rpartition("/")[0] for name in names if name.endswith(f"/{members[-1]}"))
        if all(f"{group}/{member}" in name_set for member in members)
    }


def is_private_group(name: str) -> bool:
    """Return whether the name of a group alone marks it as one that other software keeps beside its data."""
    return name in ("#refs#", "#subsystem#") or name.startswith(INDEX_PREFIX)


def is_in_index(name: str) -> bool:
    """Return whether an array belongs to an index of PyTables, whose chunks must stay: PyTables counts rows by them."""
    return any(group.startswith(INDEX_PREFIX) for group in name.split("/")[:-1])


def _is_index(item: _Attributes, name: str) -> bool:
    return name.startswith(INDEX_PREFIX) or item.text(b"CLASS") in (b"INDEX", b"TINDEX")


def _is_of_matlab(item: _Attributes, name: str) -> bool:
    return name in ("#refs#", "#subsystem#")


def _is_of_keras(item: _Attributes, name: str) -> bool:
    """Return whether a group has the weights of a layer, or a whole file those of a model, as Keras 1 to 3 write it."""
    if name == "vars":
        return item.has(b"name")
    return any(item.has(mark) for mark in (b"layer_names", b"weight_names", b"keras_version"))


def _is_placeholder(item: _Attributes, name: str) -> bool:
    return _is_scale(item, name) and item.text(b"NAME").startswith(NO_VARIABLE)


def _is_scale(item: _Attributes, name: str) -> bool:
    return item.text(b"CLASS") == b"DIMENSION_SCALE"


def _is_empty(item: _Attributes, name: str) -> bool:
    return bool(np.any(item.value(MATLAB_EMPTY, 0)))


def _is_pickled(item: _Attributes, name: str) -> bool:
    return item.text(b"CLASS") == b"VLARRAY" and item.text(b"PSEUDOATOM") == b"object"


def _is_file_node(item: _Attributes, name: str) -> bool:
    return item.text(b"NODE_TYPE") == b"file"


def _is_text_in_lists(item: _Attributes, name: str) -> bool:
    return item.text(b"PSEUDOATOM") in (b"vlunicode", b"vlstring")


def _is_object_of_matlab(item: _Attributes, name: str) -> bool:
    return bool(np.any(item.value(b"MATLAB_object_decode", 0)))


def _is_text_of_matlab(item: _Attributes, name: str) -> bool:
    return item.text(b"MATLAB_class") == b"char"


def _is_pandas_index(item: _Attributes, name: str) -> bool:
    return item.text(b"CLASS") == b"ARRAY" and item.has(b"kind", b"name")


def _is_ragged_index(item: _Attributes, name: str) -> bool:
    return item.text(b"neurodata_type") == b"VectorIndex"


def _is_row_id(item: _Attributes, name: str) -> bool:
    return item.text(b"neurodata_type") == b"ElementIdentifiers"


def _are_time_stamps(item: _Attributes, name: str) -> bool:
    return name == "timestamps" and item.has(b"interval", b"unit")


STRUCTURES = (
    Structure("an index of PyTables", True, _is_index, "PyTables searches its table with it"),
    Structure(CELLS, True, _is_of_matlab, "name the array of references to them"),
    Structure(WEIGHTS, True, _is_of_keras, "there are no samples in it"),
    Structure("a dimension of netCDF without values", False, _is_placeholder, "it only has a length"),
    Structure(DIMENSION_SCALE, False, _is_scale, "a coordinate of other arrays", is_coordinate=True),
    Structure("an empty array of MATLAB", False, _is_empty, "it holds its sizes in place of values"),
    Structure("pickled objects of PyTables", False, _is_pickled, "only PyTables reads them"),
    Structure("a file inside the file, of PyTables", False, _is_file_node, "only PyTables reads it"),
    Structure("text of PyTables in lists", False, _is_text_in_lists, "its numbers are characters"),
    Structure("an object of a class of MATLAB", False, _is_object_of_matlab, "only MATLAB reads it"),
    Structure(MATLAB_TEXT, False, _is_text_of_matlab, "its numbers are characters", is_coordinate=True),
    Structure("an index of pandas", False, _is_pandas_index, "it labels rows or columns", is_coordinate=True),
    Structure("ends of ragged rows of NWB", False, _is_ragged_index, "pass it as segments.ends", is_coordinate=True),
    Structure("row numbers of NWB", False, _is_row_id, "they name rows", is_coordinate=True),
    Structure("time stamps of NWB", False, _are_time_stamps, "a coordinate of the samples", is_coordinate=True),
)
"""All structures; the first one that marks an object counts."""

COORDINATES = frozenset({AXIS, *(structure.what for structure in STRUCTURES if structure.is_coordinate)})
"""The structures with values that are worth loading, if a user names them; but no targets."""

SOFTWARE: tuple[tuple[str, bytes, bytes], ...] = (
    ("Keras", b"keras_version", b""),
    ("AnnData", b"encoding-type", b"anndata"),
    ("NWB", b"nwb_version", b""),
    ("BIOM", b"format-url", b"http://biom-format.org"),
    ("loom", b"LOOM_SPEC_VERSION", b""),
    ("cooler", b"format", b"HDF5::Cooler"),
    ("cooler", b"format", b"HDF5::MCOOL"),
    ("cooler", b"format", b"HDF5::SCOOL"),
    ("netCDF", b"_NCProperties", b""),
    ("PyTables", b"PYTABLES_FORMAT_VERSION", b""),
)
"""Programs by an attribute of the root, and how its text begins."""


def software_of(file: Any) -> str | None:
    """Return the program or format that marks an open file as its own; None if no mark is known."""
    root = _Attributes(file.id)
    for software, name, value in SOFTWARE:
        if root.has(name) and root.text(name).startswith(value):
            return software
    with suppress(*FAULTS):  # listing the names reports the damage
        names = [*file]
        for name in names[:MAX_ROOT_NAMES]:
            link = file.id.links.get_info(name.encode() if isinstance(name, str) else name)
            if link.type == h5py.h5l.TYPE_HARD and _Attributes(file[name].id).has(b"MATLAB_class"):
                return "MATLAB"
        if "h5md" in names and _Attributes(file["h5md"].id).has(b"version"):
            return "H5MD"
        if {"matrix", "row_attrs", "col_attrs", "attrs"} <= set(names) and "LOOM_SPEC_VERSION" in file["attrs"]:
            return "loom"
    return None


def axes_of(file: Any, group: str) -> set[str]:
    """Return the names of arrays of a group that its attributes call axes, as those of NXdata and NXcanSAS do."""
    item = _Attributes(file[group or "/"].id)
    if not item.has(b"signal"):
        return set()
    signal = item.text(b"signal")
    values = (item.value(name, ()) for name in (b"axes", signal + b"_axes"))
    names = [text for value in values for text in np.ravel(value).tolist()]
    texts = [text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in names]
    return {name for text in texts for name in re.split("[,:]", text)} - {signal.decode(errors="replace")}


def biom_shape(group: Any) -> tuple[int, int] | None:
    """Return rows and columns of a sparse matrix of BIOM, which has the shape of the table at the root."""
    root, name = group.file, str(group.name).strip("/")
    shape = _Attributes(root.id).value(b"shape", ())
    if software_of(root) != "BIOM" or np.shape(shape) != (2,) or name not in BIOM_MATRICES:
        return None
    n_observations, n_samples = (int(n) for n in shape)
    return (n_observations, n_samples) if name == BIOM_MATRICES[0] else (n_samples, n_observations)


def reading_of(what: str) -> str:
    """Return how a structure is used, or why it is no data."""
    return next((structure.reading for structure in STRUCTURES if structure.what == what), "")
