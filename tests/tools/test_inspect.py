"""What ``inspect_file`` says of a file is what h5py, and reading, find."""

import os
from types import SimpleNamespace

import h5py
import hdf5plugin  # noqa: F401  # its filters, so that h5py writes what it is asked to
import numpy as np
import pytest
import torch
import yaml
from arguments import nested
from factories import Stored
from lightning_models import Recorder, quiet_trainer

import lightning_h5
from lightning_h5 import H5FileError
from lightning_h5.counters import Counters
from lightning_h5.loading import FEW_BLOCKS
from lightning_h5.tools.inspect import advice, inspect_file, inspect_folder


@pytest.fixture
def zoo(make_h5):
    rows = np.arange(200 * 12, dtype="f4").reshape(200, 3, 4)
    path = make_h5(
        {
            "a/gz": Stored(rows, "chunked", (32, 3, 4), options={"compression": "gzip", "compression_opts": 7}),
            "a/guess": Stored(rows, "chunked", (50, 1, 2), options={"compression": "lzf", "shuffle": True}),
            "a/plain": rows,
            "a/part": Stored(rows, "chunked", (32, 3, 4), written=64, options={"fillvalue": -1}, maxshape="fixed"),
            "labels": np.arange(200),
            "none": np.zeros((0, 3)),
        }
    )
    with h5py.File(path, "a") as file:
        file["same"] = file["a/plain"]
        file["soft"] = h5py.SoftLink("/a/gz")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file["away"] = h5py.ExternalLink("other.h5", "/x")
        file["round"] = file["a"]
        file["text"] = ["one", "two"]
        file["kind"] = np.dtype("f8")
        file["scalar"] = 3.5
        file["empty"] = h5py.Empty("i4")
        file["lists"] = np.array([np.arange(3), np.arange(2)], dtype=h5py.vlen_dtype("i4"))
        file["pointers"] = file.create_dataset("refs", data=[file["a"].ref], dtype=h5py.ref_dtype)
        file["a"].attrs["made"] = "by hand"
    return path


def test_every_name_of_a_file_is_listed_once_before_what_is_in_it(zoo):
    entries = {entry.name: entry for entry in inspect_file(zoo).entries}
    assert {name for name, entry in entries.items() if entry.kind == "array"} == {
        "a/gz", "a/guess", "a/plain", "a/part", "labels", "none", "text", "scalar", "empty", "lists", "pointers",
    }  # fmt: skip
    assert {name: (entry.kind, entry.target) for name, entry in entries.items() if "link" in entry.kind} == {
        "same": ("hard link", "a/plain"),
        "soft": ("soft link", "/a/gz"),
        "dangling": ("soft link", "/nowhere"),
        "away": ("external link", "other.h5:/x"),
        "round": ("hard link", "a"),
        "refs": ("hard link", "pointers"),
    }
    assert entries["a"].n_attributes == 1
    names = list(entries)
    assert all(names.index(name.rpartition("/")[0]) < at for at, name in enumerate(names) if "/" in name)


def test_arrays_are_described_as_h5py_describes_them(zoo):
    arrays = {array.name: array for array in inspect_file(zoo).arrays}
    with h5py.File(zoo) as file:
        for name, array in arrays.items():
            if array.storage is None:
                continue
            there = file[name]
            assert (array.shape, array.chunks) == (there.shape, there.chunks), name
            assert array.n_stored_bytes == there.id.get_storage_size(), name
    assert arrays["a/gz"].filters == ("gzip 7",)
    assert arrays["a/guess"].filters == ("shuffle", "lzf")
    assert arrays["a/gz"].ratio == pytest.approx(200 * 12 * 4 / arrays["a/gz"].n_stored_bytes)
    assert "list of str" in arrays["text"].problem
    assert "scalar" in arrays["scalar"].problem
    assert "no shape" in arrays["empty"].problem


@pytest.mark.wide
@pytest.mark.parametrize("name", ["a/gz", "a/guess", "a/plain", "a/part"])
def test_a_row_costs_what_is_said(zoo, name, nothing_held):
    """Each row alone, with nothing kept: the mean of what is counted."""
    cost = next(array.row for array in inspect_file(zoo).arrays if array.name == name)
    read = decoded = 0
    for row in range(200):
        dataset = lightning_h5.H5LazyDataset(
            zoo,
            name,
            files={"cache_bytes": 0},
        )
        before = dict.fromkeys(Counters().names, 0)
        dataset.read_batch([row])
        counted = {key: value - before[key] for key, value in dataset.counters.total().items()}
        read, decoded = read + counted["bytes_read"], decoded + counted["bytes_decoded"]
        dataset.close()
    # The last chunk holds fewer rows than the others, and is read as often for each.
    assert cost.bytes_read == pytest.approx(read / 200, rel=0.15, abs=1)
    assert cost.bytes_decoded == decoded / 200
    assert cost.why_slow is None


def test_what_only_the_library_reads_is_said_with_the_reason(make_h5):
    path = make_h5(x=Stored(np.arange(64).reshape(16, 4), "chunked", (4, 4), options={"scaleoffset": 0}))
    (array,) = inspect_file(path).arrays
    assert "no decoder" in array.row.why_slow


def test_a_filter_that_is_missing_is_a_problem_of_one_array(make_h5, tmp_path):
    path = make_h5(y=np.arange(4))
    with h5py.File(path, "a") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2,))
        plist.set_filter(33333, h5py.h5z.FLAG_OPTIONAL, ())
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((4,)), plist)
    arrays = {array.name: array for array in inspect_file(path).arrays}
    assert "number 33333" in arrays["x"].problem
    assert arrays["y"].problem is None


@pytest.mark.parametrize(
    ("libver", "options", "level"),
    [
        (None, {}, 0),
        (None, {"compression": "lzf"}, 0),
        (None, {"compression": "gzip"}, 1),
        (None, {"fletcher32": True}, 1),
        (None, {"fletcher32": True, "compression": "gzip"}, 1),
        ("latest", {}, 0),
        ("latest", {"compression": "gzip"}, 1),
        ("latest", {"fletcher32": True}, 2),
        ("latest", {"fletcher32": True, "compression": "gzip"}, 3),
        ("latest", {"fletcher32": True, "compression": "lzf"}, 2),
    ],
    ids=str,
)
def test_the_integrity_level_follows_from_checksums_and_format(make_h5, libver, options, level):
    path = make_h5({"x": Stored(np.zeros((40, 3)), "chunked", (10, 3), options=options)}, libver=libver)
    report = inspect_file(path)
    assert report.arrays[0].integrity == level
    assert report.integrity.startswith(f"level {level}: ")


def test_the_advice_names_files_that_memory_cannot_keep(make_h5, monkeypatch):
    path = make_h5(x=np.zeros((100, 1 << 14)), y=np.arange(100))
    assert "any order costs the same" in " ".join(inspect_file(path).advice.reasons)
    monkeypatch.setattr(advice, "page_cache_memory", lambda: 10 << 20)
    found = inspect_file(path).advice
    assert found.datamodule == "LazyH5DataModule"
    assert "the default order mixes runs of rows" in " ".join(found.reasons)


def test_the_advice_is_a_configuration_that_trains(zoo):
    advice = inspect_file(zoo).advice
    assert advice.x_keys == ("a/gz",) or advice.x_keys == ("a/guess",)
    assert advice.y_keys == ("labels",)
    config = yaml.safe_load(advice.yaml)["data"]
    module = getattr(lightning_h5, config["class_path"])(**config["init_args"], with_index=True)
    model = Recorder()
    quiet_trainer(max_epochs=1).fit(model, datamodule=module)
    assert len(model.train_rows[0]) == 180


@pytest.mark.parametrize("name", ["yes", "007", "a b", "it's", "1e3", "ü", "*b"])
def test_any_name_survives_the_yaml(make_h5, name):
    path = make_h5({name: np.zeros((30, 2))})
    advice = inspect_file(path).advice
    assert yaml.safe_load(advice.yaml)["data"]["init_args"] == advice.settings


def test_a_sparse_matrix_is_no_input(make_h5):
    path = make_h5(
        {"X/data": np.zeros(900), "X/indices": np.zeros(900, int), "X/indptr": np.arange(31), "z": np.ones(30)}
    )
    advice = inspect_file(path).advice
    assert advice.x_keys == ("z",)
    assert any("'X' is a sparse matrix" in reason for reason in advice.reasons)


def test_rows_in_memory_take_what_they_hold(make_h5):
    path = make_h5(x=np.zeros((1001, 5), "f4"), y=np.zeros(1001, "i2"))
    per_row = 5 * 4 + 8  # y_dtype: int64
    assert inspect_file(path).advice.cached_bytes == 1001 * per_row


def test_many_files_are_one_set_and_outliers_are_named(make_h5, tmp_path):
    for at in range(5):
        make_h5({"x": np.zeros((10, 3)), "y": np.zeros(10)}, name=f"set/{at}.h5")
    make_h5({"x": np.zeros((10, 4)), "y": np.zeros(10)}, name="set/wide.h5")
    make_h5({"x": np.zeros((10, 3))}, name="set/less.h5")
    broken = tmp_path / "set" / "broken.h5"
    broken.write_bytes(b"no file of that kind")
    report = inspect_folder(os.path.dirname(broken))
    assert (len(report.paths), report.n_alike, report.n_rows) == (8, 5, 50)
    said = {os.path.basename(path): text for path, text in report.outliers.items()}
    assert set(said) == {"wide.h5", "less.h5", "broken.h5"}
    assert said["wide.h5"] == "'x': 6 of 7 files have it as float64 (3,); here it is float64 (4,)"
    assert said["less.h5"] == "'y': 6 of 7 files have it, but this one does not"
    assert "is not an HDF5 file" in said["broken.h5"]


@pytest.mark.wide
def test_a_thousand_arrays_are_all_there(make_h5):
    report = inspect_file(make_h5({f"g{i % 10}/x{i}": np.zeros((3, 2)) for i in range(1000)}))
    assert len(report.arrays) == 1000
    assert len(report.entries) == 1010


def test_a_damaged_file_is_described_as_far_as_it_goes(make_h5):
    path = make_h5({f"g/x{i}": np.arange(50) for i in range(8)})
    with open(path, "rb") as file:
        whole = file.read()
    n_said = 0
    for at in range(96, len(whole), 97):
        with open(path, "wb") as file:
            file.write(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        try:
            inspect_file(path)
        except H5FileError:
            n_said += 1
    assert n_said < len(range(96, len(whole), 97))


def test_many_files_are_advised_on_as_one_set(make_h5, tmp_path):
    for at in range(3):
        make_h5({"x": np.zeros((40, 3), "f4"), "label": np.zeros(40), "patient": np.arange(40)}, name=f"all/{at}.h5")
    folder = str(tmp_path / "all")
    advice = inspect_folder(folder).example.advice
    assert advice.settings["train_path"] == folder
    assert advice.cached_bytes == 3 * 40 * (3 * 4 + 8)
    assert advice.settings["split"]["group_key"] == "patient"
    assert any("group_key: patient" in reason for reason in advice.reasons)
    files = [f"{folder}/0.h5", f"{folder}/2.h5"]
    assert inspect_folder(files).example.advice.settings["train_path"] == files


def test_a_file_of_few_rows_validates_on_none(make_h5):
    assert "val_fraction" not in inspect_file(make_h5(x=np.zeros((3, 2)))).advice.settings


def test_tables_and_what_cannot_be_read_are_said(make_h5):
    table = np.zeros(5, dtype=[("a", "f4"), ("b", "i4"), ("label", "i4")])
    assert "'t' is a table: the input is 't/a', 't/b' (a tuple)" in inspect_file(make_h5(t=table)).advice.reasons[0]
    path = make_h5(y=np.zeros(0))
    with h5py.File(path, "a") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2,))
        plist.set_filter(33333, h5py.h5z.FLAG_OPTIONAL, ())
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((4,)), plist)
    report = inspect_file(path)
    (found,) = [array for array in report.arrays if array.name == "x"]
    assert found.chunks == (2,)
    assert len(found.filters) == 1
    assert "number 33333" in report.advice.reasons[0]


def test_an_array_whose_name_is_no_utf_8_is_listed_with_why_it_cannot_be_read(make_h5):
    path = make_h5(y=np.zeros(30))
    with h5py.File(path, "a") as file:
        file.create_dataset(b"ma\xf1ana", data=np.arange(30))
    arrays = {array.name: array for array in inspect_file(path).arrays}
    assert arrays["ma\udcf1ana"].shape == (30,)
    assert "is a name that is not UTF-8" in arrays["ma\udcf1ana"].problem
    assert arrays["y"].problem is None


@pytest.mark.parametrize(
    "more", [{}, {"y": np.zeros(120, "f4"), "z": np.zeros((120, 9))}], ids=["alone", "with others"]
)
def test_the_shuffle_bytes_that_are_advised_mix_enough_blocks(make_h5, monkeypatch, nothing_held, more):
    """Of a file whose rows fit neither the default nor the memory, as these are made to be."""
    monkeypatch.setattr("lightning_h5.tools.inspect.advice.SHUFFLE_BYTES", 1 << 20)
    monkeypatch.setattr("lightning_h5.tools.inspect.advice.available_memory", lambda: None)
    stored = Stored(np.zeros((120, 1 << 18), "f4"), "chunked", (2, 1 << 18), {"compression": "gzip"})
    settings = inspect_file(make_h5({"x": stored, **more})).advice.settings
    module = lightning_h5.LazyH5DataModule(**nested(**settings))
    module.setup("fit")
    assert module.train_dataloader().sampler.present_order().window >= FEW_BLOCKS
    module.teardown("fit")


def test_rows_are_cached_only_if_they_fit_in_the_dtypes_they_are_trained_in(make_h5, monkeypatch):
    monkeypatch.setattr("lightning_h5.tools.inspect.advice.SHUFFLE_BYTES", 1 << 16)
    stored = Stored(np.zeros((1000, 1000), "u1"), "chunked", (50, 1000), {"compression": "gzip"})
    path = make_h5({"x": stored})
    found = []
    for free in (2_000_000, 7_999_999, 8_000_000):  # twice the stored bytes; one less than twice those in float32
        monkeypatch.setattr(
            "lightning_h5.tools.inspect.advice.available_memory", lambda free=free: SimpleNamespace(n_bytes=free)
        )
        advice = inspect_file(path).advice
        assert (advice.settings["x_dtype"], advice.cached_bytes) == ("float32", 4_000_000)
        found.append(advice.datamodule)
    assert found == ["LazyH5DataModule", "LazyH5DataModule", "RankCachedH5DataModule"]


@pytest.mark.parametrize("patient", [np.arange(100) // 10, (np.arange(100) // 10).astype("S4")], ids=["int", "text"])
def test_a_member_of_a_table_names_groups_and_is_no_input(make_h5, patient):
    rows = np.zeros(100, [("a", "f8"), ("b", "f4"), ("label", "i4"), ("patient", patient.dtype)])
    rows["label"], rows["patient"] = np.arange(100) % 2, patient
    settings = inspect_file(make_h5({"events": rows})).advice.settings
    assert settings.items() >= {"x_key": ["events/a", "events/b"], "y_key": "events/label"}.items()
    assert settings["split"].items() >= {"group_key": "events/patient", "stratify_key": "events/label"}.items()
    module = lightning_h5.LazyH5DataModule(**settings)
    module.setup("fit")
    held = [set(patient[module._cut.parts[split][0]].tolist()) for split in ("train", "val")]
    assert held[0]
    assert held[1]
    assert not held[0] & held[1]
    module.teardown("fit")


def test_columns_that_name_rows_are_no_input_though_a_table_has_no_other(make_h5):
    nested = np.dtype([("u", "f4"), ("v", "f4")])
    rows = np.zeros(40, [("hit", nested), ("patient", "i4"), ("event_id", "i8")])
    advice = inspect_file(make_h5({"events": rows})).advice
    assert (advice.datamodule, advice.settings) == (None, {})


def test_a_table_is_no_group_key_whatever_its_name(make_h5):
    rows = np.zeros(40, [("a", "f4"), ("b", "f4")])
    assert "group_key" not in inspect_file(make_h5({"patients": rows})).advice.settings


@pytest.mark.parametrize("name", ["label", "labels", "target", "train/y", "mask", "image_mask", "classes"])
def test_an_array_that_is_called_a_target_is_no_input_if_there_is_another(make_h5, name):
    path = make_h5({name: np.zeros((40, 30)), "x": np.zeros((40, 4), "f4"), "mean": np.zeros((3, 3))})
    assert inspect_file(path).advice.x_keys == ("x",)
    path = make_h5({name: np.zeros((40, 30)), "subject_id": np.arange(40), "mean": np.zeros((3, 3))})
    assert inspect_file(path).advice.x_keys == (name,)


@pytest.mark.parametrize(("label", "dtype"), [(2**63 - 1, "int64"), (2**63, None)])
def test_labels_that_int64_cannot_hold_are_not_cast_to_it(make_h5, label, dtype):
    labels = np.array([0, label] * 20, "u8")
    settings = inspect_file(make_h5({"x": np.zeros((40, 4), "f4"), "y": labels})).advice.settings
    assert settings.get("y_dtype") == dtype
    assert settings["y_key"] == "y"


def test_one_row_is_one(make_h5):
    reasons = inspect_file(make_h5({"x": np.zeros((1, 4), "f4")})).advice.reasons
    assert "There is 1 row, too few to hold some out for validation." in reasons


def test_text_with_other_rows_than_the_input_is_not_offered(make_h5):
    path = make_h5({"data": np.zeros((148, 7), "i4"), "source/target_material": np.array([b"depletedU"])})
    advice = inspect_file(path).advice
    assert not any("target_material" in text for text in (*advice.reasons, *advice.comments))
    path = make_h5({"data": np.zeros((3, 7), "i4"), "source/target_material": np.array([b"a", b"b", b"c"])})
    assert any("target_material" in reason for reason in inspect_file(path).advice.reasons)


@pytest.mark.parametrize(
    ("name", "shape", "is_picture"),
    [
        ("array", (64, 64, 3), True),
        ("image", (48, 64), True),
        ("image", (3, 32, 40), True),
        ("signal", (4000, 2, 3), False),
    ],
)
def test_a_picture_in_each_group_is_a_sample(make_h5, name, shape, is_picture):
    path = make_h5({f"tiles/({at}, 0)/{name}": np.full(shape, at, "u1") for at in range(12)})
    settings = inspect_file(path).advice.settings
    assert (settings.get("sample") == "segment" and "window" not in settings) == is_picture
    if is_picture:
        module = lightning_h5.LazyH5DataModule(**settings)
        module.setup("fit")
        assert next(iter(module.train_dataloader())).shape[1:] == shape
        module.teardown("fit")


def test_a_column_of_many_values_is_inspected_with_one_split_at_most(make_h5, monkeypatch):
    calls = []
    original = lightning_h5.order.group_split
    monkeypatch.setattr("lightning_h5.order.group_split", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    label = np.arange(2000) // 10
    label[7] = 999  # a class with one row is on one side, whatever the share
    settings = inspect_file(make_h5(x=np.zeros((2000, 3), "f4"), label=label)).advice.settings
    assert settings["split"] == {"val_fraction": 0.1, "stratify_key": "label"}
    assert len(calls) == 1


def test_columns_of_a_group_that_are_alike_are_suggested_as_one_field(make_h5):
    arrays = {f"signals/eeg/{name}": np.zeros(300, "f4") for name in ("C10", "C2", "C3", "O1")}
    says = "x_key={'eeg': ['signals/eeg/C2', 'signals/eeg/C3', 'signals/eeg/C10', ...]} stacks the arrays"
    assert says in inspect_file(make_h5(arrays)).advice.reasons[0]
    arrays["signals/eeg/time"] = np.zeros(300)
    assert "stacks" not in inspect_file(make_h5(arrays)).advice.reasons[0]


def test_fields_of_one_name_are_told_apart_by_their_groups(make_h5):
    arrays = {
        f"parts/{name}/value": np.zeros((60, 4, 3), dtype) for name, dtype in (("position", "f4"), ("force", "f8"))
    }
    arrays |= {f"parts/{name}/time": np.arange(60.0) for name in ("position", "force")}
    settings = inspect_file(make_h5(arrays)).advice.settings
    assert settings["x_key"] == {"position": "parts/position/value", "force": "parts/force/value"}
    assert settings["segments"]["join"] in ("parts/position/time", "parts/force/time")


@pytest.mark.parametrize("has_times", [False, True])
def test_frames_of_h5md_are_samples_or_steps(make_h5, has_times):
    arrays = {f"particles/all/{name}/value": np.zeros((30, 40, 3), "f4") for name in ("position", "velocity")}
    if has_times:
        arrays |= {f"particles/all/{name}/time": np.arange(30.0) for name in ("position", "velocity")}
    path = make_h5(arrays | {"observables/energy/value": np.zeros(30)})
    with h5py.File(path, "a") as file:
        file.create_group("h5md").attrs["version"] = [1, 1]
    keys = {name: f"particles/all/{name}/value" for name in ("position", "velocity")}
    settings = inspect_file(path).advice.settings
    assert settings["x_key"] == keys
    assert settings.get("segments") == ({"join": "particles/all/position/time"} if has_times else None)


@pytest.mark.parametrize(
    ("columns", "target"),
    [
        ({"score": np.random.default_rng(0).random(40)}, "score"),
        ({"temperature": np.arange(40.0)}, None),
        ({"weights": np.ones(40)}, None),
        ({"x_pos": np.ones(40), "y_pos": np.ones(40)}, None),
        ({"y": np.arange(40.0)}, "y"),
    ],
)
def test_coordinates_and_weights_are_no_targets(make_h5, columns, target):
    path = make_h5({"patterns": np.zeros((40, 8, 8), "f4"), **columns})
    assert inspect_file(path).advice.settings.get("y_key") == target


def test_settings_of_a_few_numbers_are_neither_input_nor_target(make_h5):
    path = make_h5({"mass": np.ones(1), "lattice": np.ones(6), "atoms": np.ones((5, 1))})
    assert inspect_file(path).advice.datamodule is None
    path = make_h5({"patterns": np.zeros((1, 60, 60)), "names/label": np.ones(1), "axis": np.ones((1, 9))})
    assert inspect_file(path).advice.settings.keys() & {"x_key", "y_key"} == {"x_key"}


def test_times_without_a_signal_are_no_samples(make_h5):
    assert inspect_file(make_h5({"times": np.arange(500.0), "events": np.ones(7)})).advice.datamodule is None
    assert inspect_file(make_h5({"times": np.arange(500.0), "flux": np.ones(500)})).advice.datamodule is not None


def test_axes_that_a_group_names_are_coordinates(make_h5):
    path = make_h5({"data/I": np.zeros((40, 30)), "data/Q": np.zeros((3, 40, 30))})
    assert inspect_file(path).advice.x_keys == ("data/Q",)
    with h5py.File(path, "a") as file:
        file["data"].attrs.update({"signal": "I", "I_axes": ["Q", "Q"]})
    assert inspect_file(path).advice.x_keys == ("data/I",)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("NODE_TYPE", "file"), ("PSEUDOATOM", "vlunicode"), ("MATLAB_object_decode", 3), ("MATLAB_class", "char")],
)
def test_numbers_that_stand_for_something_else_are_no_samples(make_h5, attribute, value):
    path = make_h5({"codes": np.ones(500, "u4")})
    assert inspect_file(path).advice.datamodule is not None
    with h5py.File(path, "a") as file:
        file["codes"].attrs[attribute] = np.bytes_(value) if isinstance(value, str) else value
    assert inspect_file(path).advice.datamodule is None


@pytest.mark.parametrize("group", ["", "resolutions/2/"])
def test_contacts_of_cooler_are_cut_by_their_first_bin(make_h5, group):
    pixels = {name: np.ones(48, "i4") for name in ("bin1_id", "bin2_id", "count")}
    arrays = {f"{group}pixels/{name}": values for name, values in pixels.items()}
    arrays |= {f"{group}bins/{name}": np.zeros(60, "i4") for name in ("start", "end")}
    offsets = np.append(np.repeat(np.arange(0, 48, 4), 5), 48)
    path = make_h5(arrays | {f"{group}indexes/bin1_offset": offsets})
    with h5py.File(path, "a") as file:
        file.attrs["format"] = "HDF5::MCOOL" if group else "HDF5::Cooler"
    settings = inspect_file(path).advice.settings
    assert settings["segments"]["offsets"] == f"{group}indexes/bin1_offset"
    assert settings["x_key"] == {name: f"{group}pixels/{name}" for name in pixels}


def test_an_image_with_a_scale_for_each_slice_comes_with_its_scales(make_h5):
    limits = {"v/image-max": np.arange(12.0) + 1, "v/image-min": np.zeros(12)}
    path = make_h5({"v/image": np.ones((12, 5, 6), "i2"), **limits})
    with h5py.File(path, "a") as file:
        file["v/image"].attrs["valid_range"] = [-32768.0, 32767.0]
    settings = inspect_file(path).advice.settings
    assert sorted(settings["x_key"]) == ["v/image", *limits]
    assert settings["x_dtype"] == {"v/image": "int16"}
    module = lightning_h5.LazyH5DataModule(**settings)
    module.setup("fit")
    assert next(iter(module.train_dataloader()))[0].dtype == torch.int16
    module.teardown("fit")
