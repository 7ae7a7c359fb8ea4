"""Which rows pass: every filter of ``CombinedHDF5Dataset`` and every pair of them against a loop over rows."""

import itertools
import re

import h5py
import numpy as np
import pytest
from arguments import nested_files
from factories import Stored
from hypothesis import given, settings
from hypothesis import strategies as st
from test_combined import assert_holds, rows_of, write_recordings
from tiers import examples

from lightning_h5.datasets import CombinedHDF5Dataset
from lightning_h5.errors import H5KeyError, H5ValueError

GUIDS = ["patient_001", "patient_004", "patient_005", "patient_008", "patient_011"]


def is_young(columns):
    return (columns["meta/age"] < 35) & (columns["guid"] != "patient_002")


FILTERS = {
    "allowed_guids": ({"allowed_guids": GUIDS}, lambda row: row["guid"] in GUIDS),
    "cs_label": ({"cs_label": True}, lambda row: row["cs_label"] != 0),
    "no cs_label": ({"cs_label": False}, lambda row: row["cs_label"] == 0),
    "bg_label": ({"bg_label": True}, lambda row: row["bg_label"] != 0),
    "no bg_label": ({"bg_label": False}, lambda row: row["bg_label"] == 0),
    "epoch_min": ({"epoch_min": -40}, lambda row: row["epoch"] >= -40),
    "epoch_max": ({"epoch_max": 50.0}, lambda row: row["epoch"] <= 50),
    "label": ({"label": 2}, lambda row: (row["target"] == 2).any()),
    "label at valid steps": (
        {"label": 0, "valid_mask": "odd"},
        lambda row: ((row["target"] == 0) & (row["odd"] != 0)).any(),
    ),
    "a number": ({"where": {"meta/visit": 3}}, lambda row: row["meta/visit"] == 3),
    "text": ({"where": {"meta/site": "Ü"}}, lambda row: row["meta/site"] == "Ü"),
    "numbers": ({"where": {"meta/age": [20, 21, 30, 35, 40]}}, lambda row: row["meta/age"] in (20, 21, 30, 35, 40)),
    "texts": ({"where": {"meta/site": ["A", "CC"]}}, lambda row: row["meta/site"] in ("A", "CC")),
    "range": ({"where": {"meta/score": {"min": -1, "max": 0.5}}}, lambda row: -1 <= row["meta/score"] <= 0.5),
    "half a range": ({"where": {"meta/visit": {"max": 5}}}, lambda row: row["meta/visit"] <= 5),
    "function": ({"where": {"meta/visit": lambda visit: visit % 3 == 0}}, lambda row: row["meta/visit"] % 3 == 0),
    "function of all": (
        {"where": is_young},
        lambda row: row["meta/age"] < 35 and row["guid"] != "patient_002",
    ),
}


def together(*names):
    """What to ask for to have several filters; None where they exclude each other."""
    asked = {}
    for name in names:
        for key, value in FILTERS[name][0].items():
            if (
                isinstance(value, dict)
                and isinstance(asked.get(key, {}), dict)
                and not set(value) & set(asked.get(key, {}))
            ):
                asked[key] = {**asked.get(key, {}), **value}
            elif key in asked:
                return None
            else:
                asked[key] = value
    return asked


PAIRS = [pair for pair in itertools.combinations(FILTERS, 2) if together(*pair) is not None]


def add_odd(paths):
    """Gives the recordings a mask of steps of their own: the target of steps of no weight is 0 anyway."""
    for number, path in enumerate(paths):
        with h5py.File(path, "r+") as file:
            shape = file["target"].shape
            file["odd"] = (np.random.default_rng(number).random(shape) < 0.05).astype("u1")
    return paths


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return add_odd(write_recordings(tmp_path_factory.mktemp("recordings")))


@pytest.fixture(scope="module")
def oracle(recordings):
    return rows_of(recordings)


def check(paths, oracle, names, **more):
    expected = [one for one in oracle if all(FILTERS[name][1](one[2]) for name in names)]
    assert 0 < len(expected) < len(oracle)
    assert_holds(CombinedHDF5Dataset(paths, **nested_files(dtype=None, **together(*names), **more)), expected)


@pytest.mark.wide
@pytest.mark.parametrize("held", [True, False], ids=["held", "read each time"])
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_the_rows_that_a_loop_keeps(recordings, oracle, request, name, held):
    if not held:
        request.getfixturevalue("nothing_held")
    check(recordings, oracle, [name])


@pytest.mark.wide
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_filters_keep_the_rows_that_pass_both(recordings, oracle, pair):
    check(recordings, oracle, pair)


def test_all_filters_together_keep_the_rows_that_pass_all(recordings, oracle):
    check(recordings, oracle, ["allowed_guids", "no cs_label", "epoch_min", "epoch_max", "label", "half a range"])


def test_filters_see_the_rows_that_indices_name_in_their_order(recordings, oracle):
    rows = np.random.default_rng(0).permutation(len(oracle))[:70]
    expected = [
        oracle[row] for row in rows if oracle[row][2]["guid"] in GUIDS and (oracle[row][2]["target"] == 2).any()
    ]
    dataset = CombinedHDF5Dataset(recordings, indices=rows, allowed_guids=GUIDS, label=2, dtype=None)
    assert_holds(dataset, expected)


@pytest.mark.slow
def test_filters_over_many_rows_keep_what_a_loop_keeps(tmp_path):
    paths = add_odd(write_recordings(tmp_path, n_rows=2000, n_guids=40, n_steps=50))
    oracle = rows_of(paths)
    for names in [*((name,) for name in FILTERS), *PAIRS]:
        check(paths, oracle, names)


@pytest.mark.parametrize(
    ("ask", "texts"),
    [
        ({"epoch_min": 1000}, ["epoch_min=1000", "keeps 0"]),
        ({"label": 9}, ["label=9", "keeps 0"]),
        ({"where": {"meta/age": 17}}, ["meta/age", "17"]),
        ({"where": {"meta/site": ["D", "E"]}}, ["meta/site", "'D'"]),
        ({"allowed_guids": ["nobody"]}, ["nobody"]),
        ({"where": lambda columns: columns["epoch"] > 1000}, ["where"]),
        ({"cs_label": True, "where": {"cs_label": 0}}, ["cs_label=True", "where"]),
    ],
)
def test_where_no_row_passes_each_filter_says_how_many_it_keeps(recordings, ask, texts):
    with pytest.raises(H5ValueError, match="no row") as error:
        CombinedHDF5Dataset(recordings, **nested_files(**ask))
    assert all(text in str(error.value) for text in texts)


def test_values_that_no_row_has_are_told(recordings, oracle):
    with pytest.warns(UserWarning, match="nobody"):
        dataset = CombinedHDF5Dataset(recordings, allowed_guids=["patient_001", "nobody"], dtype=None)
    assert_holds(dataset, [one for one in oracle if one[2]["guid"] == "patient_001"])


@pytest.mark.wide
@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, np.array], ids=lambda kind: kind.__name__)
def test_values_may_come_in_any_collection(recordings, oracle, kind):
    dataset = CombinedHDF5Dataset(recordings, allowed_guids=kind(GUIDS), where={"meta/age": kind([20, 30])}, dtype=None)
    assert_holds(dataset, [one for one in oracle if one[2]["guid"] in GUIDS and one[2]["meta/age"] in (20, 30)])


def test_one_guid_may_be_given_alone(recordings, oracle):
    dataset = CombinedHDF5Dataset(recordings, allowed_guids="patient_001", dtype=None)
    assert_holds(dataset, [one for one in oracle if one[2]["guid"] == "patient_001"])


# Numbers as they are -----------------------------------------------------------------------------------------


def rows_kept(path, **ask):
    try:
        return CombinedHDF5Dataset(path, **nested_files(**ask)).index[1].tolist()
    except H5ValueError as error:
        if "passes all filters" not in str(error):
            raise
        return []


def test_bounds_and_values_are_rounded_as_the_column_is(make_h5):
    path = make_h5(epoch=np.array([0.0, 0.1, 0.2], "f4"))
    assert rows_kept(path, epoch_max=0.1) == [0, 1]
    assert rows_kept(path, epoch_min=0.1) == [1, 2]
    assert rows_kept(path, where={"epoch": 0.1}) == rows_kept(path, where={"epoch": [0.1]}) == [1]


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["u1", "i1", ">u2", "i4", "u8", "i8", "f2", "f4", "f8", "bool"])
def test_bounds_and_values_beyond_a_dtype_are_compared_as_numbers(make_h5, dtype):
    path = make_h5(x=np.array([0, 1, 1], dtype))
    for low, high in itertools.product([-1e300, -(10**30), -129, 0], [1, 256, 10**30, 1e300, np.inf]):
        assert rows_kept(path, where={"x": {"min": low, "max": high}}) == [0, 1, 2]
    for value in (-1, 300, 2**63, 2**70, -(10**30), 1e300):
        assert rows_kept(path, where={"x": value}) == []
        assert rows_kept(path, where={"x": [value]}) == []
        assert rows_kept(path, where={"x": [value, 1]}) == [1, 2]
    assert rows_kept(path, where={"x": {"min": 0.5}}) == rows_kept(path, where={"x": {"min": 1}}) == [1, 2]
    assert rows_kept(path, where={"x": {"min": 2}}) == []


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_large_ids_are_told_apart(make_h5, dtype):
    ids = np.arange(2**53 - 30, 2**53 + 30).astype(dtype)
    path = make_h5(id=ids)
    wanted = ids[1::2].tolist()
    assert rows_kept(path, where={"id": wanted}) == list(range(1, 60, 2))
    assert rows_kept(path, where={"id": ids[1::2]}) == list(range(1, 60, 2))
    for number in range(28, 34):
        assert rows_kept(path, where={"id": wanted[0] - 1 + number}) == [number]
        assert rows_kept(path, where={"id": [wanted[0] - 1 + number]}) == [number]
        assert rows_kept(path, where={"id": {"max": wanted[0] - 1 + number}}) == list(range(number + 1))


NUMBERS = st.one_of(st.integers(-3, 300), st.floats(-3, 300, width=32), st.booleans())


@pytest.mark.wide
@settings(max_examples=examples(150))
@given(
    dtype=st.sampled_from(["u1", "i2", "i8", "f4", "f8", "bool", ">i4"]),
    stored=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    wanted=st.one_of(
        NUMBERS,
        st.lists(NUMBERS, min_size=1, max_size=5),
        st.tuples(NUMBERS, NUMBERS).map(sorted).map(lambda ends: {"min": float(ends[0]), "max": int(ends[1]) + 1}),
    ),
)
def test_any_numbers_are_compared_as_python_compares_them(make_h5, dtype, stored, wanted):
    column = np.array(stored, dtype)
    if isinstance(wanted, dict):
        passes = [wanted["min"] <= value <= wanted["max"] for value in column.tolist()]
    else:
        passes = [value in (wanted if isinstance(wanted, list) else [wanted]) for value in column.tolist()]
    path = make_h5(x=column, name="example.h5")
    assert rows_kept(path, where={"x": wanted}) == np.flatnonzero(passes).tolist()


def test_not_a_number_is_in_no_range_and_equals_nothing(make_h5):
    path = make_h5(x=np.array([np.nan, 1, -np.inf, np.inf]))
    assert rows_kept(path, where={"x": {"min": -np.inf}}) == rows_kept(path, where={"x": {"max": np.inf}}) == [1, 2, 3]
    assert rows_kept(path, where={"x": lambda x: np.isnan(x)}) == [0]


def test_a_flag_is_set_where_it_is_not_zero(make_h5):
    path = make_h5(cs_label=np.array([0, 1, 2, 255, 0], "u1"), bg_label=np.array([0.0, 1, 0.5, 0, -1]))
    assert rows_kept(path, cs_label=True) == [1, 2, 3]
    assert rows_kept(path, cs_label=np.bool_(False)) == [0, 4]
    assert rows_kept(path, bg_label=1) == [1, 2, 4]


# Functions ---------------------------------------------------------------------------------------------------


def test_a_function_of_all_columns_sees_each_file_alone(recordings, oracle):
    seen = []

    def first_of_each_file(columns):
        seen.append(len(columns["guid"]))
        return np.arange(seen[-1]) == 0

    dataset = CombinedHDF5Dataset(recordings, where=first_of_each_file, dtype=None)
    assert_holds(dataset, [one for one in oracle if one[1] == 0])
    assert sum(seen) == len(oracle)


def test_a_function_may_look_at_all_columns_that_there_are(recordings):
    names = []

    def of_all(columns):
        names.append({name for name, column in columns.items() if column.ndim == 1})
        return np.ones(len(columns["guid"]), bool)

    CombinedHDF5Dataset(recordings, where=of_all)
    one_dimensional = {"epoch", "cs_label", "bg_label", "guid", "meta/age", "meta/score", "meta/site", "meta/visit"}
    assert names == [one_dimensional] * 3


def test_a_function_sees_our_names_and_columns_that_are_not_loaded(make_h5):
    path = make_h5({"x": np.zeros((4, 2)), "meta/a": np.arange(4), "b": np.array([b"t", b"u", b"t", b"u"])})
    kept = CombinedHDF5Dataset(
        path, ["x"], field_map={"age": "meta/a"}, where=lambda columns: (columns["age"] > 0) & (columns["b"] == "u")
    )
    assert kept.index[1].tolist() == [1, 3]
    with pytest.raises(H5KeyError, match="nothing"):
        CombinedHDF5Dataset(path, where=lambda columns: columns["nothing"] == 1)


def test_a_function_can_ask_whether_a_column_is_there(recordings):
    dataset = CombinedHDF5Dataset(
        recordings, where=lambda columns: columns["epoch"] > 0 if "nothing" not in columns else columns["nothing"]
    )
    assert len(dataset) > 0
    with pytest.raises(H5ValueError, match="target"):
        CombinedHDF5Dataset(recordings, where=lambda columns: columns["target"][:, 0] > 0)


@pytest.mark.parametrize(
    "gives",
    [
        lambda column: column.astype(int),
        lambda column: np.flatnonzero(column),
        lambda column: True,
        lambda column: (column > 0)[:-1],
        lambda column: (column > 0)[:, None],
        lambda column: None,
    ],
    ids=["numbers", "places", "one bool", "too few", "two axes", "nothing"],
)
def test_what_a_function_gives_must_be_a_mask(recordings, gives):
    with pytest.raises(H5ValueError, match="mask"):
        CombinedHDF5Dataset(recordings, where={"meta/age": gives})
    with pytest.raises(H5ValueError, match="mask"):
        CombinedHDF5Dataset(recordings, where=lambda columns: gives(columns["meta/age"]))


def test_a_list_of_bools_is_a_mask(make_h5):
    path = make_h5(x=np.arange(3))
    assert rows_kept(path, where={"x": lambda column: [False, True, True]}) == [1, 2]


# Labels ------------------------------------------------------------------------------------------------------

IDS = np.array([[0, 1, 1, 0, 0], [2, 2, 2, 2, 0], [3, 1, 2, 0, 0], [3, 3, 3, 3, 3], [1, 0, 0, 0, 0], [2, 3, 2, 3, 3]])
VALID = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0], [1, 1, 0, 0, 0]])
N, T, C = *IDS.shape, 4
ONE_HOT = np.eye(C)[IDS]
TARGETS = {
    "(N, T)": IDS,
    "(N, T, C)": ONE_HOT,
    "(N, C, T)": ONE_HOT.transpose(0, 2, 1),
}


def passing(label, valid=None):
    counts = np.ones_like(IDS) if valid is None else valid if valid.ndim == 2 else valid[:, None]
    return [row for row in range(N) if ((IDS[row] == label) & (np.broadcast_to(counts, IDS.shape)[row] != 0)).any()]


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["f4", "u1", "i8", ">f8", "f2"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_label_is_found_whatever_the_target_looks_like(make_h5, kind, dtype):
    cut = TARGETS[kind].astype(dtype)
    paths = [
        make_h5(target=Stored(cut[:4], "chunked", (1, *cut.shape[1:]), {"compression": "lzf"}), valid=VALID[:4]),
        make_h5(target=cut[4:], valid=VALID[4:]),
    ]
    for label in range(C):
        for valid in (None, VALID):
            dataset = CombinedHDF5Dataset(paths, label=label, valid_mask=None if valid is None else "valid")
            files, rows = dataset.index
            assert (files * 4 + rows).tolist() == passing(label, valid)
            assert np.array_equal(dataset.read_batch(range(len(dataset)))["target"], cut[passing(label, valid)])


def test_a_label_of_one_class_a_row(make_h5):
    path = make_h5(target=np.array([0, 1, 2, 1, 0, 1], "f4"), valid=np.array([1, 1, 1, 0, 0, 1]))
    assert rows_kept(path, label=1) == [1, 3, 5]
    assert rows_kept(path, label=0, valid_mask="valid") == [0]
    assert rows_kept(path, label=1, valid_mask="valid") == [1, 5]
    assert rows_kept(path, label=3) == []


@pytest.mark.parametrize("kind", TARGETS)
def test_a_mask_may_have_one_value_a_row(make_h5, kind):
    whole = np.array([1, 0, 1, 1, 0, 0.5])
    path = make_h5(target=TARGETS[kind], valid=whole)
    for label in range(C):
        assert rows_kept(path, label=label, valid_mask="valid") == passing(label, whole)


@pytest.mark.parametrize("kind", TARGETS)
def test_padding_is_of_class_0_unless_a_mask_says_which_steps_count(make_h5, kind):
    path = make_h5(target=TARGETS[kind], weight=VALID.astype("f4"))
    assert rows_kept(path, label=0) == [0, 1, 2, 4]
    assert rows_kept(path, label=0, valid_mask="weight") == [0, 1, 4]


def test_rows_of_zeros_among_one_hot_have_no_class(make_h5):
    padded = ONE_HOT * VALID[..., None]
    for target in (padded, padded.transpose(0, 2, 1)):
        path = make_h5(target=target)
        for label in range(C):
            assert rows_kept(path, label=label) == passing(label, VALID)


def test_one_hot_along_either_axis_is_refused_until_it_is_told(make_h5):
    square = np.stack([np.eye(3), np.eye(3)[[1, 0, 2]], np.diag([1, 0, 0])])
    square[2] = [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    path = make_h5(y=square)
    with pytest.raises(H5ValueError, match=re.escape("field_map={'target': {'key': ..., 'layout': 'NTC'}}")):
        CombinedHDF5Dataset(path, label=1, field_map={"target": "y"})
    for layout, expected in (("NTC", [0, 1]), ("NCT", [0, 1, 2])):
        told = {"target": {"key": "y", "layout": layout}}
        assert rows_kept(path, label=1, field_map=told) == expected
    assert rows_kept(path, label=2, field_map={"target": "y"}) == [0, 1]  # the same either way


@pytest.mark.parametrize("layout", ["NTC", "NCT"])
def test_a_layout_that_is_told_is_taken_for_square_targets(make_h5, layout):
    ids = np.array([[0, 0, 1, 1], [2, 2, 2, 2], [3, 0, 3, 0]])
    target = np.eye(4)[ids]
    path = make_h5(target=target if layout == "NTC" else target.transpose(0, 2, 1))
    for label in range(4):
        expected = [row for row in range(3) if label in ids[row]]
        assert rows_kept(path, label=label, field_map={"target": {"layout": layout}}) == expected


def test_one_axis_of_classes_is_told(make_h5):
    path = make_h5(target=np.eye(3)[[0, 2, 1, 2]])
    assert rows_kept(path, label=2, field_map={"target": {"key": "target", "layout": "NC"}}) == [1, 3]
    assert rows_kept(path, label=1) == [0, 1, 2, 3]  # class ids, as far as anybody said


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        (np.zeros((3, 2, 2, 2)), None),
        (np.full((3, 4, 5), 0.5), None),
        (np.ones((3, 4, 5)), None),
        (ONE_HOT, "NT"),
        (IDS, "NTC"),
        (IDS, "TN"),
        (IDS / 2, "NC"),
        (np.array([b"a", b"b"]), None),
    ],
    ids=[
        "four axes",
        "probabilities",
        "several classes",
        "ids told",
        "classes told",
        "no layout",
        "no classes",
        "text",
    ],
)
def test_a_target_that_cannot_be_looked_at_is_refused(make_h5, target, layout):
    path = make_h5(target=target)
    told = None if layout is None else {"target": {"key": "target", "layout": layout}}
    with pytest.raises(H5ValueError, match="target"):
        CombinedHDF5Dataset(path, label=1, field_map=told)


@pytest.mark.parametrize("shape", [(N, T + 1), (N, 1), (N, T, C)], ids=str)
def test_a_mask_of_another_shape_is_refused(make_h5, shape):
    path = make_h5(target=IDS, valid=np.ones(shape))
    with pytest.raises(H5ValueError, match="valid_mask"):
        CombinedHDF5Dataset(path, label=1, valid_mask="valid")


def test_a_mask_is_of_no_use_without_a_label(recordings):
    with pytest.raises(H5ValueError, match="valid_mask"):
        CombinedHDF5Dataset(recordings, valid_mask="weight")


@pytest.mark.wide
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 8),
    n_steps=st.integers(1, 6),
    n_classes=st.integers(1, 6),
    first=st.sampled_from(["NTC", "NCT"]),
    padded=st.booleans(),
)
def test_one_hot_is_told_right_or_refused_never_taken_for_the_other(
    make_h5, seed, n, n_steps, n_classes, first, padded
):
    random = np.random.default_rng(seed)
    ids = random.integers(0, n_classes, (n, n_steps))
    valid = random.random((n, n_steps)) < (0.6 if padded else 2)
    target = np.eye(n_classes)[ids] * valid[..., None]
    path = make_h5(target=target if first == "NTC" else target.transpose(0, 2, 1), name="example.h5")
    for label in range(n_classes):
        expected = [row for row in range(n) if ((ids[row] == label) & valid[row]).any()]
        told = {"target": {"key": "target", "layout": first}}
        assert rows_kept(path, label=label, field_map=told) == expected
        try:
            found = rows_kept(path, label=label)
        except H5ValueError as error:
            if "either axis" not in str(error):
                raise
        else:
            assert found == expected


# What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize(
    "ask",
    [
        {"allowed_guids": []},
        {"allowed_guids": [None]},
        {"allowed_guids": [b"patient_001"]},
        {"allowed_guids": [1]},
        {"allowed_guids": 1},
        {"cs_label": "yes"},
        {"cs_label": 2},
        {"cs_label": [True]},
        {"bg_label": 0.5},
        {"epoch_min": 5, "epoch_max": 4},
        {"epoch_min": float("nan")},
        {"epoch_max": "3"},
        {"epoch_max": True},
        {"epoch_max": [3]},
        {"label": "2"},
        {"label": 1.5},
        {"label": 2.0},
        {"label": True},
        {"label": [2]},
        {"label": np.array([1, 2])},
        {"label": {"min": 1}},
        {"where": 3},
        {"where": ["meta/age"]},
        {"where": {"meta/age": {}}},
        {"where": {"meta/age": {"min": 3, "most": 5}}},
        {"where": {"meta/age": {"min": 5, "max": 3}}},
        {"where": {"meta/age": {"min": float("nan")}}},
        {"where": {"meta/age": {"min": "3"}}},
        {"where": {"meta/age": {"min": 1j}}},
        {"where": {"meta/age": {"min": None}}},
        {"where": {"meta/age": float("nan")}},
        {"where": {"meta/age": [1, float("nan")]}},
        {"where": {"meta/age": []}},
        {"where": {"meta/age": None}},
        {"where": {"meta/age": "20"}},
        {"where": {"meta/age": ["20"]}},
        {"where": {"meta/age": {20, "A"}}},
        {"where": {"meta/age": [[20]]}},
        {"where": {"meta/age": np.array(20)}},
        {"where": {"meta/site": 3}},
        {"where": {"meta/site": ["A", 3]}},
        {"where": {"meta/site": {"min": 3}}},
        {"where": {"meta/site": b"A"}},
        {"where": {"target": 3}},
        {"where": {"fhr_st": {"min": 3}}},
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(recordings, ask):
    with pytest.raises(H5ValueError) as error:
        CombinedHDF5Dataset(recordings, **nested_files(**ask))
    assert "passes all filters" not in str(error.value)


@pytest.mark.parametrize("name", ["cs_label", "bg_label"])
def test_a_flag_of_text_is_refused(make_h5, name):
    with pytest.raises(H5ValueError, match="flag"):
        CombinedHDF5Dataset(make_h5({name: np.array([b"yes", b"no"])}), **nested_files(**{name: True}))


@pytest.mark.parametrize("ask", [{"epoch_min": 0}, {"allowed_guids": ["a"]}, {"cs_label": True}, {"label": 1}], ids=str)
def test_a_filter_names_the_array_that_it_misses(make_h5, ask):
    with pytest.raises(H5KeyError):
        CombinedHDF5Dataset(make_h5(x=np.zeros((3, 2))), **nested_files(**ask))
