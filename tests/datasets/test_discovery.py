"""Fields that nobody named: arrays that belong to one row, and never those that only happen to be equally long."""

import ast
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import CombinedHDF5DataModule, H5KeyError
from lightning_h5.datasets import CombinedHDF5Dataset

N = 6


def some(*shape, dtype="f4"):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


SAMPLES_OF_THEIR_OWN = {
    "episodes": {f"data/demo_{i}/{name}": some(N, 3) for i in range(2) for name in ("actions", "obs/state")},
    "episodes that are not all alike": {
        **{f"data/demo_{i}/{name}": some(N, 3) for i in range(2) for name in ("actions", "obs/state")},
        "data/demo_1/obs/camera": some(N, 4, 4),
    },
    "episodes of several lengths": {
        f"data/demo_{i}/{name}": some(n, 3) for i, n in enumerate([N, 9, N]) for name in ("actions", "rewards")
    },
    "sessions of subjects": {"ann/monday/eeg": some(N, 3), "bob/friday/eeg": some(N, 3)},
    "episodes beside a column": {"a/x": some(N, 3), "b/x": some(N, 3), "id": some(N)},
    "an array for each protein": {"embeddings/P12345": some(N, 8), "embeddings/Q99999": some(N, 8)},
    "proteins, some of other lengths": {"P12345": some(N, 8), "Q99999": some(N, 8), "A00001": some(9, 8)},
    "numbered clips": {"clip_001": some(N), "clip_002": some(N)},
    "numbered episodes": {
        f"{name}_{i}": some(N, *axes) for i in range(2) for name, axes in (("obs", (3,)), ("act", (2,)), ("rew", ()))
    },
    "numbered subjects": {f"subject{i}/ecg_{i}": some(N, 3) for i in range(2)},
    "numbered columns, each twice": {f"{name}{i}": some(N, dtype=t) for i in (1, 2) for name, t in ("xf", "tf")}
    | {"k1": some(N, dtype="i4"), "k2": some(N, dtype="i4")},
    "proteins of which one is of another length": {
        "P1": some(N, 8),
        "P2": some(N, 8),
        "P3": some(9, 8),
        "id": some(N, dtype="i4"),
    },
    "clips of several lengths": {"bark": some(N), "meow": some(N), "moo": some(9)},
}

ROWS = {
    "input and label": {"x": some(N, 3), "y": some(N, dtype="i8")},
    "columns": {"age": some(N), "height": some(N), "weight": some(N)},
    "columns of a group": {"table/age": some(N), "table/height": some(N)},
    "an image and its mask": {"image": some(N, 4, 4), "mask": some(N, 4, 4, dtype="u1")},
    "pairs with a column": {"clean": some(N, 8), "noisy": some(N, 8), "id": some(N, dtype="i4")},
    "one array": {"x": some(N, 3)},
    "groups of other names": {"image/pixels": some(N, 3), "meta/patient": some(N, dtype="i4")},
    "one name on two levels": {"x": some(N, 3), "meta/x": some(N, dtype="i4")},
    "an array of other rows": {"x": some(N, 3), "y": some(N, dtype="i8"), "classes": some(4, dtype="u1")},
    "numbered inputs and a label": {"x1": some(N, 3), "x2": some(N, 3), "y": some(N, dtype="i8")},
    "numbered cameras": {"obs/cam0": some(N, 4), "obs/cam1": some(N, 4), "action": some(N, 2)},
    "a mean of all images": {"images": some(N, 4, 4), "labels": some(N), "mean": some(1, 4, 4)},
    "training rows": {
        "x_train": some(N, 4, 4),
        "y_train": some(N, dtype="i8"),
        "groups": some(N, dtype="i8"),
        "x_test": some(4, 4, 4),
        "y_test": some(4, dtype="i8"),
    },
    "cells and their categories": {
        "X": some(N, 5),
        **{f"obs/{name}/codes": some(N, dtype="i1") for name in ("batch", "type")},
        **{f"obs/{name}/categories": np.array([b"a", b"b"]) for name in ("batch", "type")},
    },
    "edges of bins": {"x": some(N, dtype="f8"), "id": some(N, dtype="i4"), "edges": some(N + 1, dtype="f8")},
}


@pytest.mark.parametrize("name", SAMPLES_OF_THEIR_OWN)
def test_samples_of_their_own_are_not_fields_of_one_row(make_h5, name):
    path = make_h5(SAMPLES_OF_THEIR_OWN[name])
    with pytest.raises(H5KeyError, match=r"load_fields was not given.* [Nn]ame|one shape of a row in one group"):
        CombinedHDF5Dataset(path)
    with pytest.raises(H5KeyError, match="fields was not given"):
        CombinedHDF5DataModule(path, batch_size=2).setup("fit")


@pytest.mark.parametrize("name", SAMPLES_OF_THEIR_OWN)
def test_arrays_that_a_user_names_are_fields(make_h5, name):
    arrays = {key: values for key, values in SAMPLES_OF_THEIR_OWN[name].items() if len(values) == N}
    dataset = CombinedHDF5Dataset(make_h5(SAMPLES_OF_THEIR_OWN[name]), list(arrays), dtype=None)
    batch = dataset.read_batch(range(N))
    assert all(np.array_equal(batch[key].numpy(), values) for key, values in arrays.items())


@pytest.mark.parametrize("name", ROWS)
def test_arrays_of_one_row_need_no_names(make_h5, name):
    arrays = {key: values for key, values in ROWS[name].items() if len(values) == N}
    batch = CombinedHDF5Dataset(make_h5(ROWS[name]), dtype=None).read_batch(range(N))
    assert set(batch) == set(arrays)
    assert all(np.array_equal(batch[key].numpy(), values) for key, values in arrays.items())


def test_the_error_says_which_arrays_are_of_one_group(make_h5):
    with pytest.raises(H5KeyError) as error:
        CombinedHDF5Dataset(make_h5(SAMPLES_OF_THEIR_OWN["episodes"]))
    assert "'data/demo_0/actions', 'data/demo_1/actions'" in str(error.value)
    assert "load_fields=['data/demo_0/actions', 'data/demo_0/obs/state']" in str(error.value)


ADVISED = {
    "two observations of a row": (
        {
            **{f"{group}/{name}": some(N, 3) for group in ("next_obs", "obs") for name in ("image", "joint")},
            "actions": some(N, 2),
        },
        {"actions", "next_obs/image", "next_obs/joint"},
    ),
    "groups and an array above": (
        {"data/a/x": some(N, 3), "data/b/x": some(N, 3), "data/c/z": some(N, 2), "y": some(N)},
        {"data/a/x", "data/c/z", "y"},
    ),
    "codes without categories": ({"a/codes": some(N), "b/codes": some(N), "y": some(N)}, {"a/codes", "y"}),
    "numbered": (
        {f"{name}_{i}": some(N, *axes) for i in range(2) for name, axes in (("obs", (3,)), ("act", ()))},
        {"obs_0", "act_0"},
    ),
}


@pytest.mark.parametrize("name", ADVISED)
def test_the_fields_that_the_error_advises_are_all_that_belong_together(make_h5, name):
    arrays, expected = ADVISED[name]
    path = make_h5(arrays)
    with pytest.raises(H5KeyError, match=r"may have its own rows") as error:
        CombinedHDF5Dataset(path)
    fields = ast.literal_eval(re.search(r"load_fields=(\[.*?\])", str(error.value))[1])
    assert set(fields) == expected
    assert len(CombinedHDF5Dataset(path, fields)) == N


def test_arrays_that_filters_name_are_fields(make_h5):
    arrays = {"target": some(N, 4, dtype="i8"), "valid": np.ones((N, 4), "i8")}
    assert len(CombinedHDF5Dataset(make_h5(arrays), label=5, valid_mask="valid")) == 1


GROUPS = st.lists(st.sampled_from(["a", "b", "demo_0", "demo_1"]), max_size=2).map("/".join)


@st.composite
def trees(draw):
    """Arrays of equal or different lengths in some groups; by name."""
    names = draw(st.lists(st.tuples(GROUPS, st.sampled_from(["x", "y", "id", "e1", "e2"])), min_size=1, max_size=6))
    found = {}
    for group, name in names:
        shape = (draw(st.sampled_from([N, N, N, 4])), *draw(st.sampled_from([(), (3,), (2, 2)])))
        found[f"{group}/{name}".strip("/")] = some(*shape, dtype=draw(st.sampled_from(["f4", "i4"])))
    return found


def is_alike(a, b):
    return a.dtype == b.dtype and a.shape[1:] == b.shape[1:]


def folded(name):
    return "".join("0" if letter.isdigit() else letter for letter in name)


def is_sound(arrays, fields):
    """Whether fields may be those of one row, by a definition that looks at each pair."""
    for a in fields:
        for b in fields:
            if a != b and a.count("/") == b.count("/") and a.rpartition("/")[2] == b.rpartition("/")[2]:
                return False
        for other, values in arrays.items():
            if (
                other not in fields
                and other.rpartition("/")[0] == a.rpartition("/")[0]
                and values.dtype == arrays[a].dtype
                and values.shape[1:] == arrays[a].shape[1:] != ()
                and any(b != a and is_alike(arrays[a], arrays[b]) for b in fields)
            ):
                return False
    looks = {(f.rpartition("/")[0], arrays[f].dtype, arrays[f].shape[1:]) for f in fields}
    numbered = all(
        any(a != b and folded(a) == folded(b) and is_alike(arrays[a], arrays[b]) for b in fields) for a in fields
    )
    return len(fields) == 1 or not (numbered or (len(looks) == 1 and arrays[fields[0]].ndim > 1))


def check_tree(make_h5, arrays):
    path = make_h5(arrays)
    try:
        dataset = CombinedHDF5Dataset(path, dtype=None)
    except H5KeyError:
        return
    fields = list(dataset[0])
    assert is_sound(arrays, fields)
    batch = dataset.read_batch(range(len(dataset)))
    assert all(np.array_equal(batch[name].numpy(), arrays[name]) for name in fields)
    dataset.close()


@pytest.mark.wide
@given(arrays=trees())
def test_any_tree_gives_rows_as_they_are_stored_or_an_error(make_h5, arrays):
    check_tree(make_h5, arrays)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=examples(2500))
@given(arrays=trees())
def test_thousands_of_trees_give_rows_as_they_are_stored_or_an_error(make_h5, arrays):
    check_tree(make_h5, arrays)
