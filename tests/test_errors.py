"""The text of errors."""

import pickle

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_h5
from lightning_h5 import H5Error, H5KeyError, H5LazyDataset, H5ValueError, LazyH5DataModule

ERRORS = [getattr(lightning_h5, name) for name in lightning_h5.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("kind", ERRORS)
@given(words=st.lists(st.tuples(st.text(min_size=1, max_size=9), st.integers(1, 4000)), max_size=6))
def test_no_message_is_longer_than_2000_characters(kind, words):
    text = " ".join(word * n for word, n in words)
    error = kind(text)
    assert len(str(error)) <= 2000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    if len(text) <= 2000:
        assert str(error) == text


def test_an_error_about_a_missing_array_has_its_key_and_the_argument_that_names_it(tmp_path):
    path = str(tmp_path / "data.h5")
    with h5py.File(path, "w") as file:
        file["images"] = np.zeros((3, 2), "f4")
    with pytest.raises(H5KeyError) as caught:
        LazyH5DataModule(path, x_key="image").setup("fit")
    error = caught.value
    assert (error.key, error.argument) == ("image", "x_key='image'")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.key, copy.argument, str(copy)) == (error.key, error.argument, str(error))
    with pytest.raises(H5KeyError, match="'image' is not in") as caught:
        H5LazyDataset(path, "image")
    assert (caught.value.key, caught.value.argument) == ("image", None)


def test_a_long_message_keeps_its_beginning_and_what_to_do():
    text = str(H5ValueError(f"'x' has the value {'v' * 5000}, which is no number. Name another array."))
    assert text.startswith("'x' has the value vvv")
    assert text.endswith("which is no number. Name another array.")
    assert len(text) < 500, "the value is cut, and the words around it stay"


def test_messages_hold_no_values_beyond_a_line(tmp_path):
    path = str(tmp_path / "compound.h5")
    with h5py.File(path, "w") as file:
        for at in range(3):
            file[f"run_{at}/table"] = np.zeros((), [(f"member_{n}", "f8", (50,)) for n in range(40)])
    with pytest.raises(H5Error) as caught:
        LazyH5DataModule(path, x_key={"table": "table"}, segments="run_*").setup("fit")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
