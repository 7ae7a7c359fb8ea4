"""Small inputs that claim, or decode to, very much take no memory in proportion to it."""

import hashlib
import struct
import tracemalloc
import zlib
from contextlib import contextmanager
from itertools import count

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5CorruptError, H5Error, H5FileError, H5MemoryError, H5ValueError, LazyH5DataModule
from lightning_h5.hdf5 import MetadataIndex
from lightning_h5.readers import Image
from lightning_h5.staging import ObjectStatus
from lightning_h5.staging.stores import Stores, _body_of


@contextmanager
def takes_at_most(n_bytes):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < n_bytes
    finally:
        tracemalloc.stop()


# Published indexes --------------------------------------------------------------------------------------------------


def stored_index(n_bytes, n, plain):
    data = struct.pack("<8sQ32sQ", b"LH5INDX1", n_bytes, b"x" * 32, n) + plain
    return data + hashlib.sha256(data).digest()


places = st.lists(st.tuples(st.integers(-3, 60), st.integers(-3, 60)), max_size=4)


@given(st.integers(0, 60), places, st.binary(max_size=80), st.sampled_from([0, 1, 1 << 60]))
def test_an_index_is_pieces_of_its_file_one_after_the_other_or_refused(n_bytes, places, content, more):
    table = np.array(places, "<i8").reshape(-1, 2).T
    data = stored_index(n_bytes, len(places) + more, zlib.compress(table.tobytes() + content))
    try:
        index = MetadataIndex.from_bytes(data, "rows.h5.index")
    except H5FileError:
        return
    end, at = 0, 0
    for start, size in places:
        assert end <= start <= start + size <= n_bytes
        assert index.find(size, start) == content[at : at + size] or not size
        end, at = start + size, at + size


@pytest.mark.parametrize("stored", [b"", b"junk", zlib.compress(bytes(8))[:-3]])
def test_what_is_no_stream_is_no_index(stored):
    with pytest.raises(H5FileError, match="no tables of a file"):
        MetadataIndex.from_bytes(stored_index(100, 1, stored), "rows.h5.index")


def test_an_index_that_decodes_to_very_much_is_refused():
    packed = zlib.compressobj()
    stream = packed.compress(np.array([0, 1 << 40], "<i8").tobytes())
    stream += b"".join(packed.compress(bytes(1 << 20)) for _ in range(300)) + packed.flush()
    with takes_at_most(200 << 20), pytest.raises(H5FileError, match="no tables of a file"):
        MetadataIndex.from_bytes(stored_index(1 << 41, 1, stream), "rows.h5.index")


# Answers of servers -------------------------------------------------------------------------------------------------


class Answer:
    def __init__(self, pieces):
        self.pieces = pieces

    def stream(self, min_chunk_size):
        return iter(self.pieces)


def test_the_body_of_an_answer_is_taken_as_far_as_it_was_asked_for():
    assert bytes(_body_of(Answer([b"abc"]), 3, "s3://b/k")) == b"abc"
    assert bytes(_body_of(Answer([b"a", b"bc"]), 3, "s3://b/k")) == b"abc"
    assert bytes(_body_of(Answer([b"ab"]), 3, "s3://b/k")) == b"ab"

    def endless():
        while True:
            yield bytes(1000)

    for pieces in (endless(), [b"abc", b"d"], [b"abcd"]):
        with pytest.raises(H5FileError, match="the server sends more"):
            _body_of(Answer(pieces), 3, "s3://b/k")


def test_a_list_of_objects_without_an_end_is_refused(monkeypatch):
    class Endless:
        def list(self, url):
            return ((f"{url}{n}.h5", ObjectStatus(1, "a", 0)) for n in count())

    stores = Stores()
    monkeypatch.setattr(stores, "_store", lambda url, options: Endless())
    monkeypatch.setattr("lightning_h5.staging.stores.MAX_LISTED", 100)
    with pytest.raises(H5FileError, match="lists more than 100 objects for 's3://b/k/'"):
        stores.list("s3://b/k/", None)


# Values -------------------------------------------------------------------------------------------------------------


def png(width, height, depth, color):
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", width, height, depth, color, 0, 0, 0)


def jpeg(width, height, marker=0xC0):
    head = struct.pack(">BBHBHHB", 0xFF, marker, 17, 8, height, width, 3)
    return b"\xff\xd8" + b"\xff\xff\xe0\x00\x04ab" + head + bytes(9) + b"\xff\xda" + bytes(20) + b"\xff\xd9"


def disguised(data, more):
    """A JPEG with bytes before a segment, which decoders skip."""
    return data[:2] + more + data[2:]


@pytest.mark.parametrize(
    "data",
    [
        png(26000, 26000, 8, 0),
        png(9000, 9000, 16, 6),
        jpeg(65500, 65500),
        jpeg(65500, 65500, 0xC2),
        disguised(jpeg(65500, 65500), b"junk\xff\x00"),
        disguised(jpeg(65500, 65500), b"\xff\x01\xff\xd3"),
    ],
)
def test_an_image_that_claims_very_much_is_refused_before_it_is_decoded(data):
    pytest.importorskip("imagecodecs")
    with takes_at_most(1 << 20), pytest.raises(ValueError, match="it declares"):
        Image().row(data)


def never_written(group, name, shape, dtype):
    group.create_dataset(name, shape, dtype, chunks=tuple(min(1000, size) for size in shape))


def test_arrays_that_describe_others_take_no_memory_by_their_declared_size(tmp_path):
    """The limits of an image of MINC2, and the shape of a sparse matrix."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["image"] = np.zeros((4, 3), "u1")
        for name in ("image-min", "image-max"):
            never_written(file, name, (1 << 40,), "f8")
        matrix = file.create_group("X")
        matrix["data"], matrix["indices"], matrix["indptr"] = np.ones(2), np.arange(2), np.arange(3)
        never_written(matrix, "shape", (2,), f"S{1 << 30}")
    for key in ("image", "X"):
        with takes_at_most(8 << 20), pytest.raises(H5Error):
            LazyH5DataModule(tmp_path / "x.h5", x_key=key, split=0.5).setup("fit")


def test_a_single_value_of_gigabytes_is_refused(tmp_path):
    kind = h5py.h5t.C_S1.copy()
    kind.set_size((1 << 31) - 1)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((2,)))
    with takes_at_most(64 << 20), pytest.raises(H5ValueError, match="for a single value"):
        LazyH5DataModule(tmp_path / "x.h5", x_key="x").setup("fit")


@pytest.mark.parametrize("decodes", ["an image", "a chunk"])
def test_a_lack_of_memory_in_a_decoder_is_no_damage(tmp_path, monkeypatch, decodes):
    def no_memory(*_):
        raise MemoryError

    with h5py.File(tmp_path / "x.h5", "w") as file:
        if decodes == "an image":
            file.create_dataset("x", (4,), h5py.vlen_dtype(np.uint8))[:] = [np.arange(3, dtype="u1")] * 4
        else:
            file.create_dataset("x", data=np.arange(40), chunks=(4,), compression="gzip", shuffle=True)
    options = {"decode": {"x": no_memory}, "collate_fn": "list"} if decodes == "an image" else {}
    if decodes == "a chunk":
        monkeypatch.setattr("lightning_h5.readers.filters.pipeline.Pipeline.decode", no_memory)
    module = LazyH5DataModule(tmp_path / "x.h5", x_key="x", batch_size=2, **options)

    def train():
        module.setup("fit")
        list(module.train_dataloader())

    with pytest.raises(H5MemoryError, match="not enough memory to decode") as error:
        train()
    assert not isinstance(error.value, H5CorruptError)
