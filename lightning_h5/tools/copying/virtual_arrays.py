"""Virtual arrays: what they are made of, in the end, and how two are compared without a look at a value of theirs.

HDF5 finds their values, and the extent of some, by opening what they are made of: other files, too, and itself again
and again where one is made of itself. So a virtual array is read only where all of that is known to be harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import h5py

from ...errors import H5ValueError
from ...files.damage import FAULTS
from .stored_types import has_class, is_variable
from .walk import address_of

__all__ = ["Trace", "description_of", "is_virtual", "refuse_mixed", "trace_virtual"]

MOST_LINKS = 16  # HDF5's own limit on links followed in one look-up
MOST_LEVELS = 16
"""Virtual arrays may be made of virtual ones, so often, where they are read."""
MOST_READS = 10_000
"""Arrays that HDF5 reads for one that is made of virtual ones: they multiply from level to level."""

LEAVES, NOWHERE = 0, -1  # no addresses: what is not followed


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What is known of a virtual array by following it to ordinary arrays.

    Attributes:
        fault: why it cannot be read, in words that follow its name; empty where it can.
        leaves: whether some of it lies in other files.
        moves: whether it shows rows that are permuted, or nobody knows.
    """

    fault: str = ""
    leaves: bool = False
    moves: bool = False


def is_virtual(array: Any) -> bool:
    """Whether h5py's low-level dataset is a virtual array."""
    return bool(array.get_create_plist().get_layout() == h5py.h5d.VIRTUAL)


def trace_virtual(file: Any, arrays: Mapping[int, Any], shuffled: set[int]) -> dict[int, Trace]:
    """What is known of each virtual array. No other file is opened, and no extent or value looked at.

    Some 10 microseconds for each array that one is made of.

    Args:
        file: the open file.
        arrays: all its virtual arrays, h5py's low-level datasets, by their address.
        shuffled: addresses of arrays whose rows are permuted.
    """
    sources = {address: _sources(file["/"].id, array) for address, array in arrays.items()}
    sorter = TopologicalSorter({address: [at for at in found if at > 0] for address, found in sources.items()})
    with suppress(CycleError):  # then it gives all but those that are made of themselves, and what is made of these
        sorter.prepare()
    traces: dict[int, Trace] = {}
    levels: dict[int, int] = {}
    reads: dict[int, int] = {}
    while ready := sorter.get_ready():
        for address in ready:
            if (found := sources.get(address)) is None:
                continue
            levels[address] = 1 + max((levels.get(at, 0) for at in found), default=0)
            # No more than tells that it is too many: the number itself may have thousands of digits.
            n_reads = sum(n * reads.get(at, 1) for at, n in found.items())
            reads[address] = n_reads if levels[address] == 1 else min(n_reads, MOST_READS + 1)
            traces[address] = _trace(found, traces, shuffled, levels[address], n_reads)
        sorter.done(*ready)
    rest = Trace(fault="is made of itself, or of one that is", moves=bool(shuffled))
    return {address: traces.get(address, rest) for address in sources}


def _trace(found: Mapping[int, int], known: Mapping[int, Trace], shuffled: set[int], level: int, n_reads: int) -> Trace:
    below = [known[at] for at in found if at in known]
    leaves = LEAVES in found or any(trace.leaves for trace in below)
    fault = next((trace.fault for trace in below if trace.fault), "")
    if NOWHERE in found:
        fault = "is made of what is not in the file"
    elif level > MOST_LEVELS or (level > 1 and n_reads > MOST_READS):
        fault = f"is made of virtual arrays, more than {MOST_LEVELS} deep or {MOST_READS:,} in all"
    return Trace(
        fault="lies in other files" if leaves else fault,
        leaves=leaves,
        moves=any(at in shuffled for at in found) or any(trace.moves for trace in below),
    )


def _sources(root: Any, array: Any) -> Counter[int]:
    """Addresses of what a virtual array is made of, or ``LEAVES`` or ``NOWHERE``, and how often."""
    found = Counter[int]()
    for (where, name), n in Counter(_pairs(array.get_create_plist())).items():
        # A "%" stands for numbers, or for itself: HDF5 then opens what is called otherwise than it says here.
        outside = where != "." or "%" in name
        found[LEAVES if outside else _follow(root, name)] += n
    return found


def _pairs(plist: Any) -> list[tuple[str, str]]:
    return [(plist.get_virtual_filename(at), plist.get_virtual_dsetname(at)) for at in range(plist.get_virtual_count())]


def _follow(root: Any, name: str) -> int:
    """The address of an array; each part of its path is looked at, since each may leave the file."""
    item, todo, n_links = root, _parts(name.encode(errors="surrogateescape")), 0
    try:
        while todo:
            if not isinstance(item, h5py.h5g.GroupID):
                return NOWHERE
            part = todo.pop()
            kind = item.links.get_info(part).type
            if kind == h5py.h5l.TYPE_HARD:
                item = h5py.h5o.open(item, part)
            elif kind == h5py.h5l.TYPE_SOFT and n_links < MOST_LINKS:
                n_links += 1
                path = item.links.get_val(part)
                item = root if path.startswith(b"/") else item
                todo += _parts(path)
            else:
                return LEAVES
        if not isinstance(item, h5py.h5d.DatasetID):
            return NOWHERE
        return LEAVES if item.get_create_plist().get_external_count() else address_of(item)
    except FAULTS:  # there is none, or it is damaged
        return NOWHERE


def _parts(path: bytes) -> list[bytes]:
    return [part for part in reversed(path.split(b"/")) if part not in (b"", b".")]


def refuse_mixed(name: str, trace: Trace) -> None:
    """Makes sure that an array that stays virtual while others are permuted shows no rows of these.

    Args:
        name: of the array.
        trace: what it is made of.

    Raises:
        H5ValueError: it does, and would change.
    """
    if trace.fault and trace.moves:
        what = "shows rows of other files beside rows" if trace.leaves else f"{trace.fault}, and may show rows"
        raise H5ValueError(
            f"{name!r} is virtual and {what} that are to be shuffled, which would change it. Write its values to an "
            "ordinary array first, or name other shuffle_keys."
        )


def description_of(array: Any) -> Any:
    """All that a virtual array is, as something to compare: what shows where, and what shows where there is nothing.

    Args:
        array: h5py's low-level dataset.
    """
    plist, stored = array.get_create_plist(), array.get_type()
    mappings = [
        (*pair, plist.get_virtual_vspace(at).encode(), plist.get_virtual_srcspace(at).encode())
        for at, pair in enumerate(_pairs(plist))
    ]
    fill: Any = plist.fill_value_defined()
    if fill == h5py.h5d.FILL_VALUE_USER_DEFINED and not (is_variable(stored) or has_class(stored, h5py.h5t.REFERENCE)):
        with suppress(TypeError):  # a number format that NumPy does not have
            fill = h5py.Dataset(array).fillvalue.tobytes()
    return plist.get_layout(), mappings, fill
