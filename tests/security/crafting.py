"""Files that are made to do harm, each by a function of a few lines; and a watch on the files that none may open.

``CASES`` has them by name. Each file lies in a folder of its own, its array is ``x`` (or what ``key`` says), and what
it reaches for lies in the folder ``elsewhere`` beside it.
"""

import ctypes
import os
import pickle
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

ROWS = 6
MINE = np.arange(ROWS * 2, dtype="f8").reshape(ROWS, 2)
SECRET = MINE + 1000
UNLIMITED = h5py.h5s.UNLIMITED
ESCAPE = "\x1b[31m\x1b]0;owned\x07\x08\x9b"
ANY = object()  # either correct values or an error
CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    """How a file is made, and what is to become of it.

    ``opt_in`` is the argument that a refusal names; ``refusal`` is text of a refusal; both None where the array is to
    be read, as ``values``, or may be refused as well where that is ``ANY``. ``leaves`` says that the opt-in leads to
    values of ``elsewhere``.
    """

    make: Any
    key: str = "x"
    opt_in: str | None = None
    refusal: str | None = None
    values: Any = None
    leaves: bool = False


def crafted(**how):
    """Adds a function ``make(file, folder)`` to the cases; ``opt_in``, ``refusal`` ... are of ``Case``."""

    def add(make):
        CASES[make.__name__.strip("_")] = Case(make, **how)
        return make

    return add


def write(case, folder):
    """The file of a case, and what lies elsewhere."""
    elsewhere = os.path.join(folder, "elsewhere")
    os.makedirs(os.path.join(folder, "here"))
    os.makedirs(elsewhere)
    with h5py.File(f"{elsewhere}/secret.h5", "w") as file:
        file.create_dataset("x", data=SECRET, chunks=(2, 2), maxshape=(None, 2))
        file["g/x"] = SECRET
    os.link(f"{elsewhere}/secret.h5", f"{elsewhere}/secret0.h5")
    SECRET.tofile(f"{elsewhere}/secret.bin")
    os.mkfifo(f"{elsewhere}/fifo")
    path = os.path.join(folder, "here", "data.h5")
    libver = getattr(case.make, "libver", "latest")
    with h5py.File(path, "w", libver=libver) as file:
        after = case.make(file, elsewhere)
    if after is not None:
        after(path)
    return path


# Other files ------------------------------------------------------------------------------------------------------

LEAVES = {"opt_in": "allow_external", "leaves": True}
LOST = {"opt_in": "allow_external"}


def _stored_in(file, *pieces):
    file.create_dataset("x", MINE.shape, "f8", external=list(pieces))


@crafted(**LEAVES)
def storage_absolute(file, elsewhere):
    _stored_in(file, (f"{elsewhere}/secret.bin", 0, 96))


@crafted(**LOST)
def storage_relative(file, elsewhere):
    _stored_in(file, (os.path.relpath(f"{elsewhere}/secret.bin"), 0, 96))


@crafted(**LEAVES)
def storage_several(file, elsewhere):
    _stored_in(file, *((f"{elsewhere}/secret.bin", at, 32) for at in (0, 32, 64)))


@crafted(**LOST)
def storage_passwd(file, elsewhere):
    _stored_in(file, ("/etc/passwd", 0, 96))


@crafted(**LOST)
def storage_fifo(file, elsewhere):
    _stored_in(file, (f"{elsewhere}/fifo", 0, 96))


@crafted(**LOST)
def storage_device(file, elsewhere):
    _stored_in(file, ("/dev/zero", 0, 96))


@crafted(**LEAVES)
def link_absolute(file, elsewhere):
    file["x"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")


@crafted(**LEAVES)
def link_up(file, elsewhere):
    file["x"] = h5py.ExternalLink("../elsewhere/secret.h5", "/g/x")


@crafted(**LOST)
def link_fifo(file, elsewhere):
    file["x"] = h5py.ExternalLink(f"{elsewhere}/fifo", "x")


@crafted(**LOST)
def link_device(file, elsewhere):
    file["x"] = h5py.ExternalLink("/dev/zero", "x")


@crafted(key="g/x", **LEAVES)
def link_as_parent(file, elsewhere):
    file["g"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "/")


@crafted(key="a/b/c/x", **LEAVES)
def link_as_grandparent(file, elsewhere):
    file["a/b"] = h5py.SoftLink("/out")
    file["out"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "/")
    with h5py.File(f"{elsewhere}/secret.h5", "a") as other:
        other["c/x"] = SECRET


@crafted(**LEAVES)
def soft_link_to_link(file, elsewhere):
    file["x"] = h5py.SoftLink("/second")
    file["second"] = h5py.SoftLink("third")
    file["third"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")


@crafted(**LEAVES)
def soft_link_into_link(file, elsewhere):
    file["x"] = h5py.SoftLink("/g/./g//x")
    file["g"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "/")


@crafted(**LOST)
def link_to_itself(file, elsewhere):
    file["x"] = h5py.ExternalLink("data.h5", "x")


@crafted(**LOST)
def link_there_and_back(file, elsewhere):
    with h5py.File(f"{elsewhere}/secret.h5", "a") as other:
        other["back"] = h5py.ExternalLink("../here/data.h5", "x")
    file["x"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "back")


@crafted(refusal="x")
def link_of_an_unknown_kind(file, elsewhere):
    group = file.create_group("g")
    group["x"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")
    file["x"] = h5py.SoftLink("/g/x")
    name = f"{elsewhere}/secret.h5".encode()

    def patch(path):
        with open(path, "r+b") as raw:
            content = raw.read()
            at = content.index(name)
            # version, flags, type (64 is external), order, length of the name, name, length of the value, value
            kind = content.rindex(b"\x40", 0, at - 1)
            raw.seek(kind)
            raw.write(bytes([200]))

    return patch


link_of_an_unknown_kind.libver = "earliest"  # without checksums


@crafted(refusal="driver")
def one_of_several_files(file, elsewhere):
    """A file that says of itself that others belong to it."""

    def replace(path):
        members = path.replace("data.h5", "part%d.h5")
        with h5py.File(members, "w", driver="family", memb_size=1 << 20) as family:
            family["x"] = np.zeros((1000, 2))
        os.replace(members % 0, path)

    return replace


# Virtual arrays -------------------------------------------------------------------------------------------------------


def virtual(file, name, sources, shape=MINE.shape, maxshape=None, dtype=h5py.h5t.IEEE_F64LE):
    """A virtual array, by ``(space, file, array, space of the source)`` for each source, without h5py's care."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    for space, where, array, source in sources:
        plist.set_virtual(space, where.encode(), array.encode(), source)
    h5py.h5d.create(file.id, name.encode(), dtype, h5py.h5s.create_simple(shape, maxshape), plist)


def whole(shape=MINE.shape):
    """All of an array."""
    return h5py.h5s.create_simple(shape)


def growing():
    """All rows of an array that may get more: HDF5 finds out how many by opening it."""
    space = h5py.h5s.create_simple(MINE.shape, (UNLIMITED, 2))
    space.select_hyperslab((0, 0), (1, 1), (1, 1), (UNLIMITED, 2))
    return space


def blocks():
    """Blocks of rows without end, each from the next array of a pattern of names."""
    space = h5py.h5s.create_simple(MINE.shape, (UNLIMITED, 2))
    space.select_hyperslab((0, 0), (UNLIMITED, 1), MINE.shape, MINE.shape)
    return space


GROWS = {"maxshape": (UNLIMITED, 2)}


@crafted(**LEAVES)
def virtual_other(file, elsewhere):
    virtual(file, "x", [(whole(), f"{elsewhere}/secret.h5", "x", whole())])


@crafted(**LOST)
def virtual_two(file, elsewhere):
    halves = []
    for at, name in ((0, "secret.h5"), (3, "secret0.h5")):
        half = whole()
        half.select_hyperslab((at, 0), (3, 2))
        halves.append((half, f"{elsewhere}/{name}", "x", half))
    virtual(file, "x", halves)


@crafted(**LEAVES)
def virtual_nested(file, elsewhere):
    virtual(file, "inner", [(whole(), f"{elsewhere}/secret.h5", "x", whole())])
    virtual(file, "middle", [(whole(), ".", "/inner", whole())])
    virtual(file, "x", [(whole(), ".", "middle", whole())])


@crafted(**LEAVES)
def virtual_over_link(file, elsewhere):
    file["l"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")
    virtual(file, "x", [(whole(), ".", "l", whole())])


@crafted(**LEAVES)
def virtual_grows(file, elsewhere):
    virtual(file, "x", [(growing(), f"{elsewhere}/secret.h5", "x", growing())], **GROWS)


@crafted(**LEAVES)
def virtual_grows_in_a_fixed_shape(file, elsewhere):
    """Its own limit is fixed, and only the selection is without end."""
    virtual(file, "x", [(growing(), f"{elsewhere}/secret.h5", "x", growing())], maxshape=MINE.shape)


@crafted(**LEAVES)
def virtual_grows_over_link(file, elsewhere):
    file["l"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")
    virtual(file, "x", [(growing(), ".", "l", growing())], **GROWS)


@crafted(**LEAVES)
def virtual_grows_nested(file, elsewhere):
    virtual(file, "inner", [(growing(), f"{elsewhere}/secret.h5", "x", growing())], **GROWS)
    virtual(file, "x", [(growing(), ".", "inner", growing())], **GROWS)


@crafted(**LOST)
def virtual_pattern(file, elsewhere):
    virtual(file, "x", [(blocks(), f"{elsewhere}/secret%b.h5", "x", whole())], **GROWS)


@crafted(**LOST)
def virtual_pattern_in_this_file(file, elsewhere):
    """The name that a look-up finds is harmless; HDF5 puts a number for ``%b``."""
    file["p%b"], file["p0"] = MINE, h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")
    virtual(file, "x", [(blocks(), ".", "p%b", whole())], **GROWS)


@crafted(**LOST)
def virtual_percent_in_this_file(file, elsewhere):
    """HDF5 takes two of these signs for one."""
    file["p%%"], file["p%"] = MINE, h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")
    virtual(file, "x", [(whole(), ".", "p%%", whole())])


@crafted(**LOST)
def virtual_missing(file, elsewhere):
    virtual(file, "x", [(whole(), f"{elsewhere}/missing.h5", "x", whole())])


@crafted(**LOST)
def virtual_fifo(file, elsewhere):
    virtual(file, "x", [(growing(), f"{elsewhere}/fifo", "x", growing())], **GROWS)


@crafted(refusal="itself")
def virtual_over_itself(file, elsewhere):
    virtual(file, "x", [(whole(), ".", "x", whole())])


@crafted(refusal="itself")
def virtual_round(file, elsewhere):
    virtual(file, "y", [(whole(), ".", "x", whole())])
    virtual(file, "x", [(whole(), ".", "y", whole())])


@crafted(values=ANY)
def soft_links_that_multiply(file, elsewhere):
    file["data"], file["l0"] = MINE, h5py.SoftLink("/")
    for level in range(1, 6):
        file[f"l{level}"] = h5py.SoftLink(f"/l{level - 1}" * 50)
    file["x"] = h5py.SoftLink("/l5/data")


# Sizes ------------------------------------------------------------------------------------------------------------

SPARSE = {"opt_in": "trusted"}
PIB = 1 << 50


@crafted(**SPARSE)
def bomb_contiguous(file, elsewhere):
    file.create_dataset("x", (PIB // 16, 2), "f8")


@crafted(**SPARSE)
def bomb_chunked(file, elsewhere):
    file.create_dataset("x", (PIB // 16, 2), "f8", chunks=(1 << 20, 2), maxshape=(None, 2))[:1] = 1


@crafted(**SPARSE)
def bomb_of_tiny_chunks(file, elsewhere):
    file.create_dataset("x", (PIB // 16, 2), "f8", chunks=(1, 1))


@crafted(**SPARSE)
def bomb_in_a_row(file, elsewhere):
    file.create_dataset("x", (4, PIB // 8), "f8", chunks=(1, 1024))


@crafted(**SPARSE)
def bomb_virtual(file, elsewhere):
    file["little"] = MINE
    part = h5py.h5s.create_simple((PIB // 16, 2))
    part.select_hyperslab((0, 0), MINE.shape)
    virtual(file, "x", [(part, ".", "little", whole())], shape=(PIB // 16, 2))


@crafted(**SPARSE)
def bomb_of_large_elements(file, elsewhere):
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(2**31 - 1)
    h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((1000,)))


@crafted(opt_in="trusted")
def large_chunk(file, elsewhere):
    file.create_dataset("x", (1 << 28, 2), "f8", chunks=(1 << 27, 2), compression="gzip")


def _chunk(file, content, filters=("gzip",)):
    array = file.create_dataset("x", MINE.shape, "f8", chunks=MINE.shape, compression=filters[0])
    array.id.write_direct_chunk((0, 0), content)


@crafted(refusal="does not decode|cannot be read")
def bomb_that_inflates(file, elsewhere):
    """Half a GiB of zeros, of which a piece was compressed, and taken 512 times; 50 MiB where HDF5 writes no more."""
    try:
        _chunk(file, _zeros(512))
    except OSError:  # older libraries cannot report the size of a huge chunk
        del file["x"]
        _chunk(file, _zeros(50))


def _zeros(n_pieces):
    packer, piece = zlib.compressobj(9), bytes(1 << 20)
    head = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    check = (n_pieces * len(piece) % 65521) << 16 | 1
    end = packer.flush()[:-4] + struct.pack(">I", check)
    return head + again * (n_pieces - 1) + end


@crafted(refusal="does not decode|cannot be read")
def chunk_that_is_too_short(file, elsewhere):
    """What is not written over is memory of whoever decodes."""
    _chunk(file, zlib.compress(b"\1" * 8))


# Types -------------------------------------------------------------------------------------------------------------


@crafted(refusal="x")
def references(file, elsewhere):
    file["y"] = MINE
    file.create_dataset("x", data=[file["y"].ref] * ROWS, dtype=h5py.ref_dtype)


@crafted(refusal="x")
def region_references(file, elsewhere):
    file["y"] = MINE
    file.create_dataset("x", data=[file["y"].regionref[:2]] * ROWS, dtype=h5py.regionref_dtype)


@crafted(refusal="x")
def lists(file, elsewhere):
    array = file.create_dataset("x", (ROWS,), h5py.vlen_dtype(h5py.string_dtype()))
    for row in range(ROWS):
        array[row] = np.array(["a"] * row, object)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _payload(elsewhere):
    return pickle.dumps(Trap(f"{elsewhere}/owned"), protocol=0)


@crafted(values=ANY)
def pickle_as_text(file, elsewhere):
    file.create_dataset("x", data=[_payload(elsewhere)] * ROWS, dtype=f"S{len(_payload(elsewhere))}")


@crafted(values=ANY)
def pickle_as_long_text(file, elsewhere):
    file.create_dataset("x", data=[_payload(elsewhere).decode()] * ROWS, dtype=h5py.string_dtype())


@crafted(refusal="x")
def pickle_as_opaque(file, elsewhere):
    file["x"] = np.array([_payload(elsewhere)] * ROWS, dtype=f"V{len(_payload(elsewhere))}")


@crafted(values=ANY)
def pickle_as_lists_of_bytes(file, elsewhere):
    array = file.create_dataset("x", (ROWS,), h5py.vlen_dtype("u1"))
    for row in range(ROWS):
        array[row] = np.frombuffer(_payload(elsewhere), "u1")


@crafted(values=MINE)
def pickle_in_attributes(file, elsewhere):
    file["x"] = MINE
    for item in (file, file["x"]):
        item.attrs["class"] = _payload(elsewhere).decode()
        item.attrs["opaque"] = np.void(_payload(elsewhere))


@crafted(values=MINE)
def path_in_attributes(file, elsewhere):
    file["x"] = MINE
    for item in (file, file["x"]):
        for name in ("path", "filename", "normalize", "external", "include", "_ncproperties"):
            item.attrs[name] = f"{elsewhere}/secret.h5"


@crafted(refusal="named datatype")
def named_type(file, elsewhere):
    file["x"] = np.dtype("f8")


@crafted(values=MINE)
def array_of_a_named_type(file, elsewhere):
    file["t"] = np.dtype("f8")
    file.create_dataset("x", data=MINE, dtype=file["t"])


def _of_filter(number, name):
    """An array of which lzf's number and name were replaced; both have to be as long as before."""

    def make(file, elsewhere):
        file.create_dataset("x", data=MINE, chunks=(2, 2), compression="lzf")

        def patch(path):
            with open(path, "r+b") as raw:
                content = raw.read()
                at = content.index(b"lzf\0\0\0\0\0")
                raw.seek(at)
                raw.write(name.ljust(8, b"\0"))
                start = content.rindex(struct.pack("<H", 32000), 0, at)
                raw.seek(start)
                raw.write(struct.pack("<H", number))

        return patch

    make.libver = "earliest"
    return make


CASES["filter_that_nobody_has"] = Case(_of_filter(61000, b"nobody"), refusal="number 61000")
CASES["filter_named_as_a_path"] = Case(_of_filter(61001, b"../e.so"), refusal="number 61001")
CASES["filter_with_escapes"] = Case(_of_filter(61002, b"\x1b[31m"), refusal="number 61002")


@crafted(refusal="x")
def table_of_very_many_members(file, elsewhere):
    file.create_dataset("x", ROWS, [(f"member{at}", "u1") for at in range(600)])


@crafted(values=np.zeros(ROWS, "u1"))
def enum_of_long_names(file, elsewhere):
    kind = h5py.enum_dtype({ESCAPE + "n" * 20_000: 0, "m" * 20_000: 1}, basetype="u1")
    file.create_dataset("x", data=np.zeros(ROWS, "u1"), dtype=kind)


@crafted(values=np.full(MINE.shape, np.nan))
def fill_of_nan(file, elsewhere):
    file.create_dataset("x", MINE.shape, "f8", fillvalue=np.nan, chunks=(2, 2))


# Names and trees ----------------------------------------------------------------------------------------------------


@crafted(values=MINE)
def round_by_hard_links(file, elsewhere):
    file["x"] = MINE
    group = file.create_group("g")
    group["up"], group["again"] = file["/"], group


@crafted(values=MINE)
def very_many_links(file, elsewhere):
    file["x"] = MINE
    for at in range(1_500):
        file[f"soft{at}"] = h5py.SoftLink("/x")
        file[f"out{at}"] = h5py.ExternalLink(f"{elsewhere}/secret.h5", "x")


@crafted(values=MINE)
def names_with_escapes(file, elsewhere):
    file["x"] = MINE
    file[f"bad{ESCAPE}"] = MINE[:, 0]
    file[f"two\nlines{ESCAPE}"] = MINE[:, 1]
    file["right\u202eleft\u2028"] = MINE[:, 1]
    file[f"group{ESCAPE}/y"] = MINE
    file["soft"] = h5py.SoftLink(f"/{ESCAPE}")
    file["out"] = h5py.ExternalLink(f"{elsewhere}/{ESCAPE}", f"{ESCAPE}")
    file[f"type{ESCAPE}"] = np.dtype([(f"member{ESCAPE}", "f8")])
    file["table"] = np.zeros(ROWS, [(f"member{ESCAPE}", "f8"), ("other", "i4")])
    file.create_dataset(f"refused{ESCAPE}", MINE.shape, "f8", external=[(f"{elsewhere}/{ESCAPE}", 0, 96)])
    file["x"].attrs[f"attribute{ESCAPE}"] = ESCAPE


@crafted(refusal="external storage|other files")
def _unprintable_storage(file, elsewhere):
    _stored_in(file, (f"{elsewhere}/{ESCAPE}\n", 0, 96))


def deep(file, elsewhere, levels=10_000):
    """Groups in groups; by number, since a path of so many parts would be slow to write."""
    group = file.id
    for _ in range(levels):
        group = h5py.h5g.create(group, b"g")
    h5py.Group(group)["x"] = MINE


# The watch -----------------------------------------------------------------------------------------------------------

IN_OPEN = 0x20


class Watch:
    """Notes each opening of files in a folder, by anybody in this machine, from its making on."""

    def __init__(self, folder):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        names = {folder: "", **{os.path.join(folder, name): name for name in os.listdir(folder)}}
        self._names = {}
        for path, name in names.items():
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), IN_OPEN)
            assert number > 0, os.strerror(ctypes.get_errno())
            self._names[number] = name

    def opened(self):
        """Names of what was opened since the last call; "" is the folder itself."""
        found = set()
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                number, _, _, size = struct.unpack_from("iIII", data, at)
                found.add(data[at + 16 : at + 16 + size].rstrip(b"\0").decode() or self._names[number])
                at += 16 + size

    def close(self):
        os.close(self._fd)
