"""Dtypes that users pass, and what of a file can become a tensor."""

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5.errors import H5ValueError
from lightning_h5.hdf5 import kind_of, torch_dtype


@pytest.mark.parametrize(
    ("given_as", "expected"),
    [
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("half", torch.float16),
        ("float", torch.float32),
        ("double", torch.float64),
        ("long", torch.int64),
        ("int", torch.int64),
        ("bool", torch.bool),
        ("f4", torch.float32),
        (">i2", torch.int16),
        (np.float32, torch.float32),
        (np.dtype(">f8"), torch.float64),
        (np.uint16, torch.uint16),
        (np.complex64, torch.complex64),
        (bool, torch.bool),
        (float, torch.float64),
        (torch.int32, torch.int32),
        (None, None),
    ],
    ids=str,
)
def test_names_numpy_and_torch_dtypes_are_understood(given_as, expected):
    assert torch_dtype(given_as, "x_dtype") is expected


NO_DTYPES = ["flaot32", "S5", "longdouble", "O", "M8[s]", "f4,f4", "", 5, object, "(2,f4"]


@pytest.mark.parametrize("wrong", NO_DTYPES, ids=str)
def test_what_a_tensor_cannot_have_is_refused_with_the_choice(wrong):
    with pytest.raises(H5ValueError, match=r"y_dtype=.* is not a dtype.*bfloat16"):
        torch_dtype(wrong, "y_dtype")


def test_a_near_name_is_suggested():
    with pytest.raises(H5ValueError, match=r"Did you mean 'float32'\?"):
        torch_dtype("flaot32", "x_dtype")


@given(st.text(st.sampled_from("fiub<>=248163(),.torch []?:SV"), max_size=10))
def test_any_text_is_a_dtype_or_an_error_of_ours(text):
    try:
        found = torch_dtype(text, "x_dtype")
    except H5ValueError:
        found = torch.float32  # refused: right too, and the only error there may be
    assert isinstance(found, torch.dtype)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (np.dtype(">f4"), "number"),
        (np.dtype("?"), "number"),
        (np.dtype(("c8", (2,))), "number"),
        (h5py.enum_dtype({"A": 1}), "number"),
        (np.dtype("S3"), "text"),
        (h5py.string_dtype(), "text"),
        (h5py.string_dtype("ascii", 4), "text"),
        (np.dtype([("a", "i4")]), "compound"),
        (np.dtype(([("a", "i4")], (2,))), "compound"),
        (h5py.vlen_dtype("i4"), "object"),
        (h5py.ref_dtype, "object"),
        (np.dtype("longdouble"), "object"),
        (np.dtype("clongdouble"), "object"),
        (np.dtype("V4"), "object"),
        (np.dtype("M8[s]"), "object"),
    ],
    ids=str,
)
def test_kinds_tell_numbers_from_text_from_the_rest(dtype, kind):
    assert kind_of(dtype) == kind
