"""Which arrays are meant: keys as users give them, and the guess where they give none."""

import h5py
import numpy as np
import pytest

from lightning_h5.errors import H5KeyError, H5ValueError
from lightning_h5.hdf5 import field_names, fill_split, guess_keys, keys_in


@pytest.mark.parametrize(
    ("keys", "kind", "names", "arrays"),
    [
        ("a/b", "single", ("a/b",), ("a/b",)),
        (["a", "b"], "tuple", ("a", "b"), ("a", "b")),
        (("a",), "tuple", ("a",), ("a",)),
        ({"image": "a/b", "age": "c"}, "dict", ("image", "age"), ("a/b", "c")),
    ],
    ids=["name", "list", "tuple of one", "mapping"],
)
def test_a_key_is_a_name_a_list_or_a_mapping(keys, kind, names, arrays):
    found = field_names(keys, "x_key")
    assert (found.kind, found.names, found.keys) == (kind, names, arrays)


@pytest.mark.parametrize("keys", ["", "/", [], {}, ["a", ""], {"a": 3}, [None], 5, None], ids=repr)
def test_what_names_no_array_is_refused(keys):
    with pytest.raises(H5ValueError, match=r"x_key=.* does not name an array"):
        field_names(keys, "x_key")


def test_split_is_filled_into_every_key():
    assert fill_split("{split}/x", "val") == "val/x"
    assert fill_split(["{split}/x", "y"], "test") == ["test/x", "y"]
    assert fill_split({"{split}": "{split}/x"}, "train") == {"{split}": "train/x"}
    assert keys_in("a", None, ["b", "c"], {"n": "d"}) == ["a", "b", "c", "d"]


def test_one_array_of_numbers_is_x_whatever_text_lies_beside_it(make_h5):
    assert guess_keys(make_h5({"g/images": np.zeros((4, 2)), "names": np.array([b"a"] * 4)})) == ("g/images", None)
    assert guess_keys(make_h5({"signal": np.zeros(4), "scale": np.float64(2)})) == ("signal", None)


def test_rows_and_one_value_a_row_are_x_and_y(make_h5):
    assert guess_keys(make_h5({"labels": np.zeros(4, int), "images": np.zeros((4, 2))})) == ("images", "labels")


@pytest.mark.parametrize(
    "arrays",
    [
        {"images": np.zeros((4, 2)), "labels": np.zeros(3)},
        {"images": np.zeros((4, 2)), "more": np.zeros((4, 2))},
        {"images": np.zeros((4, 2)), "labels": np.zeros(4), "ids": np.zeros(4)},
    ],
    ids=["other length", "two inputs", "two targets"],
)
def test_a_doubt_is_an_error_that_lists_the_arrays_and_says_what_to_add(make_h5, arrays):
    path = make_h5(arrays)
    with pytest.raises(H5KeyError) as error:
        guess_keys(path)
    text = str(error.value)
    assert path in text
    assert "x_key='images'" in text
    for name, array in arrays.items():
        assert f"{name!r}: shape {array.shape}, {array.dtype}" in text


def test_the_example_of_an_error_is_no_column_that_names_rows(make_h5):
    arrays = {"images": np.zeros((4, 2)), "label": np.zeros(4), "subject_id": np.zeros(4), "session_no": np.zeros(4)}
    with pytest.raises(H5KeyError, match="for example x_key='images', y_key='label'"):
        guess_keys(make_h5(arrays))


def test_a_file_without_numbers_says_so(make_h5):
    with pytest.raises(H5KeyError, match="None of them holds rows of numbers"):
        guess_keys(make_h5(names=np.array([b"a"])))
    with pytest.raises(H5KeyError, match="no arrays"):
        guess_keys(make_h5())


def test_a_long_list_of_arrays_is_cut(make_h5):
    path = make_h5()
    with h5py.File(path, "a") as file:
        for i in range(60):
            file[f"array{i:02}"] = np.zeros(3)
    with pytest.raises(H5KeyError, match="and 20 more"):
        guess_keys(path)
