"""Codecs in descriptions of arrays: plain data that other processes load, and a part of the identity of a file."""

import pickle
import subprocess
import sys

import h5py
import numpy as np
import pytest
from guards import HANG

from lightning_h5.hdf5 import Packing, find_array, layout_of, meaning_of, open_h5
from lightning_h5.readers import MoveLast, Ragged, Recode, Stack, Unpack, Widen
from lightning_h5.readers.codecs import codec_of

PACKING = Packing(attributes=(("scale_factor", "0.5"),), scale=0.5, missing=(-1,), fill=-9)
PACKED = (
    "Unpack(packing=Packing(attributes=(('scale_factor', '0.5'),), scale=0.5, offset=0.0, missing=(-1,), "
    "dtype='float64', stored=None, unclear=None, policy='refuse'), is_compiled=False)"
)


def total(row):
    """What a user passes as ``decode``."""
    return row.sum()


@pytest.fixture
def arrays(tmp_path):
    """A number, an octet, a complex number and a table in a file, each in rows of two."""
    path = str(tmp_path / "rows.h5")
    with h5py.File(path, "w") as file:
        for code in ("i2", "u1", "c8"):
            file[code] = np.zeros((3, 2), code)
        file["table"] = np.zeros(3, [("a", "f4"), ("b", "i4")])
    with open_h5(path) as file:
        return {key: layout_of(find_array(file, key), path, key) for key in file}


@pytest.mark.parametrize(
    ("key", "codec", "text"),
    [
        ("c8", codec_of("real", "x"), "RealParts()"),
        ("u1", codec_of("bits:9", "x"), "Bits(n_bits=9)"),
        ("i2", Recode((1, 0)), "Recode(codes=(1, 0))"),
        ("i2", Widen(), "Widen()"),
        ("table", Stack(("a", "b"), 0), "Stack(members=('a', 'b'), axis=0, of_each=None)"),
        ("i2", MoveLast(0), "MoveLast(axis=0)"),
        ("i2", Unpack(PACKING), PACKED),
        ("i2", Unpack(Packing(attributes=(), fill=-9)), ""),
        ("i2", Ragged(), "Ragged()"),
        ("i2", codec_of(total, "x"), "Function(total)"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_a_decoded_array_loads_in_another_process_with_its_identity(arrays, key, codec, text):
    array = arrays[key].decoded(codec)
    assert meaning_of(array) == text
    program = (
        f"import pickle, sys; sys.path[:] = {sys.path!r}; array = pickle.load(sys.stdin.buffer);"
        "from lightning_h5.hdf5 import meaning_of; print(meaning_of(array), array.dtype, array.row_shape)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(array), capture_output=True, timeout=HANG, check=True
    )
    assert loaded.stdout.decode().strip() == f"{text} {array.dtype} {array.row_shape}".strip()
