"""Patterns of names: each object once, whatever leads to it; damage is an error, and other files stay closed."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import CombinedHDF5DataModule, H5CorruptError, H5KeyError, H5ValueError, LazyH5DataModule
from lightning_h5.catalog import kept_parts

N_GROUPS = 4


def values_of(datamodule, split="train"):
    """The first value of each sample of a split."""
    datamodule.setup("fit")
    batch = next(iter(getattr(datamodule, f"{split}_dataloader")()))
    values = batch if not isinstance(batch, dict) else batch["x"]
    return sorted(float(np.asarray(one).ravel()[0]) for one in values)


LINKS = st.lists(
    st.tuples(st.sampled_from(["hard", "soft", "relative"]), st.integers(0, 30), st.booleans()), max_size=6
)
"""Links, each to a group or array, or to an earlier link."""


@settings(max_examples=examples(60))
@given(links=LINKS, numbers=st.permutations(range(9)))
def test_each_object_is_one_sample_whatever_links_lead_to_it(tmp_path_factory, links, numbers):
    path = tmp_path_factory.mktemp("links") / "links.h5"
    with h5py.File(path, "w") as file:
        names = [f"d{numbers[at]}" for at in range(N_GROUPS)]
        for at, name in enumerate(names):
            file[f"groups/{name}/x"] = np.full((3, 2), at, "f4")
            file[f"arrays/{name}"] = np.full((3, 2), at, "f4")
        for number, (kind, which, is_numbered) in enumerate(links):
            target, name = names[which % len(names)], f"{'d1' if is_numbered else 'best'}{number}"
            for group in ("groups", "arrays"):
                if kind == "hard":
                    file[f"{group}/{name}"] = file[f"{group}/{target}"]
                else:
                    file[f"{group}/{name}"] = h5py.SoftLink(target if kind == "relative" else f"/{group}/{target}")
            names.append(name)
    expected = [float(at) for at in range(N_GROUPS)]
    whole = {"batch_size": 99, "sample": "segment", "shuffle": False}
    assert values_of(LazyH5DataModule(str(path), x_key="x", segments="groups/*", **whole)) == expected
    assert values_of(LazyH5DataModule(str(path), x_key="arrays/*", **whole)) == expected
    assert values_of(CombinedHDF5DataModule(str(path), fields=["x"], segments="groups/*", **whole)) == expected
    with h5py.File(path) as file:  # the oracle: objects that names lead to, as h5py compares them
        assert len({file["groups"][name].id for name in file["groups"]}) == N_GROUPS
    halves = {"split": {"val_fraction": 0.5, "seed": len(links)}}
    for keys in ({"x_key": "x", "segments": "groups/*"}, {"x_key": "arrays/*"}):
        datamodule = LazyH5DataModule(str(path), **keys, **whole, **halves)
        assert sorted(values_of(datamodule) + values_of(datamodule, "val")) == expected


def test_groups_with_one_array_by_hard_links_are_one_sample_and_an_array_in_common_makes_no_other(tmp_path):
    path = tmp_path / "shared.h5"
    with h5py.File(path, "w") as file:
        file["mask"] = np.full(5, 7, "f4")
        for at in range(3):
            file[f"data/d{at}/x"] = np.full(5, at, "f4")
            file[f"data/d{at}/mask"] = file["mask"]
        file["data/again/x"], file["data/again/mask"] = file["data/d1/x"], h5py.SoftLink("/mask")
    whole = {"segments": "data/*", "sample": "segment", "batch_size": 9, "shuffle": False}
    datamodule = LazyH5DataModule(str(path), x_key={"m": "mask", "x": "x"}, **whole)
    assert values_of(datamodule) == [0, 1, 2]
    pattern = {"x_key": {"m": "data/*/mask", "x": "data/*/x"}, "batch_size": 9, "shuffle": False}
    assert values_of(LazyH5DataModule(str(path), **pattern)) == [0, 1, 2]


@pytest.fixture
def aliased(tmp_path):
    """Four groups, of which the third has another name."""
    path = str(tmp_path / "aliased.h5")
    with h5py.File(path, "w") as file:
        for at in range(4):
            file[f"data/d{at}/x"] = np.full((5, 2), at, "f4")
        file["data/best"] = file["data/d2"]
        file["mask/train"] = np.array([b"best", b"d0", b"d1"])
        file["mask/val"] = np.array([b"d3"])
        file["twice/train"], file["twice/val"] = np.array([b"best", b"d0"]), np.array([b"d2"])
    return path


WHOLE = {"x_key": "x", "segments": "data/*", "sample": "segment", "batch_size": 9, "shuffle": False}


def test_lists_of_splits_may_call_a_segment_by_any_of_its_names(aliased):
    datamodule = LazyH5DataModule(aliased, **WHOLE, split={"key": "mask/{split}"})
    assert (values_of(datamodule), values_of(datamodule, "val")) == ([0, 1, 2], [3])
    with pytest.raises(H5ValueError, match="'d2' for 'train' and 'val'"):
        LazyH5DataModule(aliased, **WHOLE, split={"key": "twice/{split}"}).setup("fit")


@pytest.mark.parametrize("name", ["d2", "best"])
def test_lines_of_a_table_may_call_a_segment_by_any_of_its_names(aliased, tmp_path, name):
    (tmp_path / "t.csv").write_text(f"name,v\nd0,10\nd1,11\n{name},12\nd3,13\n")
    table = {"path": str(tmp_path / "t.csv"), "on": {"name": "@name"}}
    datamodule = LazyH5DataModule(aliased, **WHOLE, y_key="table/v", table=table)
    datamodule.setup("fit")
    _, labels = next(iter(datamodule.train_dataloader()))
    assert labels.flatten().tolist() == [10, 11, 12, 13]


def test_a_kept_catalog_knows_the_other_names(aliased, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_parts, "MIN_ARRAYS", 0)
    options = {**WHOLE, "split": {"key": "mask/{split}"}, "files": {"catalog_dir": str(tmp_path / "kept")}}
    for _ in range(2):
        datamodule = LazyH5DataModule(aliased, **options)
        assert (values_of(datamodule), values_of(datamodule, "val")) == ([0, 1, 2], [3])
        assert len(list((tmp_path / "kept").glob("*.catalog"))) == 1


# Damage -----------------------------------------------------------------------------------------------------------

OPENED = {
    "groups": {"x_key": "x", "segments": "data/*", "sample": "row"},
    "windows": {"x_key": "x", "segments": "data/*", "window": 2},
    "arrays": {"x_key": "data/*/x"},
    "attributes": {"x_key": {"x": "x", "s": "@s"}, "segments": "data/*"},
    "split": {"x_key": "x", "segments": "data/*", "split": 0.3},
}


def damaged(path, name, libver):
    """Write a file of groups of which an object cannot be read."""
    with h5py.File(path, "w", libver=libver) as file:
        for at in range(5):
            file[f"data/d{at}/x"] = np.full((5 + at, 2), at, "f4")
            file[f"data/d{at}"].attrs["s"] = at
        file["y"], file["z"] = np.arange(7.0), np.arange(7.0)
        address = h5py.h5o.get_info(file[name].id).addr
    content = bytearray(Path(path).read_bytes())
    content[address + (9 if libver == "latest" else 0)] ^= 0x10
    Path(path).write_bytes(content)
    with h5py.File(path) as file, pytest.raises(KeyError):
        file[name]
    return str(path)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("name", ["data/d3", "data/d3/x", "data"])
@pytest.mark.parametrize("way", OPENED)
def test_a_damaged_object_that_a_pattern_matches_is_an_error_that_names_it(tmp_path, way, name, libver):
    path = damaged(tmp_path / "damaged.h5", name, libver)
    with pytest.raises(H5CorruptError, match=f"'{name}") as error:
        LazyH5DataModule(path, **OPENED[way]).setup("fit")
    assert path in str(error.value)
    assert len(str(error.value)) <= 2000


@pytest.mark.parametrize("make", [LazyH5DataModule, CombinedHDF5DataModule])
def test_a_damaged_array_is_not_left_out_where_fields_are_inferred(tmp_path, make):
    path = damaged(tmp_path / "damaged.h5", "z", "latest")
    with pytest.raises(H5CorruptError, match=r"'z' in .*damaged\.h5"):
        make(path).setup("fit")


def test_a_damaged_group_of_a_split_is_not_taken_for_a_missing_one(tmp_path):
    path = tmp_path / "splits.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["train/x"], file["val/x"] = np.arange(5.0), np.arange(5.0)
        address = h5py.h5o.get_info(file["val"].id).addr
    content = bytearray(path.read_bytes())
    content[address + 9] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(H5CorruptError, match="'val"):
        LazyH5DataModule(str(path), x_key="{split}/x").setup("fit")


# Links that lead elsewhere ----------------------------------------------------------------------------------------


def test_a_soft_link_to_nothing_that_a_pattern_matches_is_an_error(aliased):
    with h5py.File(aliased, "a") as file:
        file["data/latest"] = h5py.SoftLink("/data/gone")
    with pytest.raises(H5KeyError, match=r"'data/latest' in .* is a soft link to '/data/gone', which does not exist"):
        LazyH5DataModule(aliased, **WHOLE).setup("fit")


LINKED = {
    "group": {"x_key": "x", "segments": "data/*"},
    "array": {"x_key": "arrays/*"},
    "array below": {"x_key": "data/*/x"},
    "pattern below": {"x_key": "x", "segments": "away/*"},
    "attribute": {"x_key": {"x": "own", "a": "away@s"}},
    "soft link": {"x_key": "soft/*"},
    "storage": {"x_key": "stored"},
}
CHILD = """
import ast, itertools, sys
from lightning_h5 import LazyH5DataModule
for allowed, arguments in itertools.product((False, True), map(ast.literal_eval, sys.argv[2:])):
    try:
        LazyH5DataModule(sys.argv[1], files={"allow_external": allowed}, **arguments).setup("fit")
        print("no error")
    except Exception as error:
        print(type(error).__name__, error)
    sys.stdout.flush()
"""


@pytest.mark.wide
def test_links_to_pipes_are_refused_by_name_and_not_opened(tmp_path):
    path, pipe = str(tmp_path / "links.h5"), str(tmp_path / "pipe")
    os.mkfifo(pipe)  # opening it would wait for a writer
    with h5py.File(path, "w") as file:
        file["data/a/x"], file["arrays/a"], file["own"] = np.arange(4.0), np.arange(4.0), np.arange(4.0)
        file["data/b"] = file["arrays/b"] = file["away"] = h5py.ExternalLink(pipe, "/g")
        file["soft/b"] = h5py.SoftLink("/away/x")
        file.create_dataset("stored", (4,), "f8", external=[(pipe, 0, 32)])
    command = [sys.executable, "-c", CHILD, path, *map(repr, LINKED.values())]
    said = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True).stdout.splitlines()
    reasons = ("allow_external=True", "is not a regular file")  # asked not to follow links, and to follow them
    for (reason, way), line in zip(itertools.product(reasons, LINKED), said, strict=True):
        assert line.startswith(("H5ValueError", "H5FileError")), way
        assert reason in line, way
        assert pipe in line, way


def test_names_that_are_not_utf8_are_refused_if_a_pattern_matches_them(tmp_path):
    path = str(tmp_path / "names.h5")
    with h5py.File(path, "w") as file:
        file["d1"], file[b"n\xff"] = np.arange(4.0), np.arange(4.0)
    with pytest.raises(H5ValueError, match=r"'\*' matches b'n\\xff' in .* not UTF-8"):
        LazyH5DataModule(path, x_key="*").setup("fit")
    assert len(values_of(LazyH5DataModule(path, x_key="d*"))) == 1


# Names with @ -----------------------------------------------------------------------------------------------------


def test_an_at_sign_is_of_an_attribute_only_in_the_last_component(tmp_path):
    path, name = str(tmp_path / "at.h5"), "C[C@H](N)O"
    with h5py.File(path, "w") as file:
        file[f"{name}/pos"], file["a@b"] = np.arange(4.0), np.arange(4.0) + 10
        file[f"{name}/pos"].attrs["unit"], file[name].attrs["energy"] = 2.5, 1.5
    assert values_of(LazyH5DataModule(path, x_key=f"{name}/pos", shuffle=False)) == [0, 1, 2, 3]
    assert values_of(LazyH5DataModule(path, x_key="a@b/", shuffle=False)) == [10, 11, 12, 13]
    combined = CombinedHDF5DataModule(path, fields={"x": "a@b/"}, sample="row", shuffle=False)
    assert values_of(combined) == [10, 11, 12, 13]
    keys = {"x": f"{name}/pos", "u": f"{name}/pos@unit", "e": f"{name}@energy"}
    datamodule = LazyH5DataModule(path, x_key=keys, sample="row")
    datamodule.setup("fit")
    batch = next(iter(datamodule.train_dataloader()))
    assert (set(batch["u"].tolist()), set(batch["e"].tolist())) == ({2.5}, {1.5})
    with pytest.raises(H5ValueError, match="'a@b/' for an array of this name"):
        LazyH5DataModule(path, x_key="a@b").setup("fit")


# Names that are not meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"x_key": "x", "segments": "*"}, {"x_key": "*/x"}])
def test_private_groups_of_other_software_match_no_star_alone(tmp_path, keys):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        for at, name in enumerate(("d0", "d1", "#refs#", "#subsystem#", "_i_table")):
            file[f"{name}/x"] = np.full((3, 2), at, "f4")
    whole = {"sample": "segment", "shuffle": False, "batch_size": 9}
    assert values_of(LazyH5DataModule(path, **keys, **whole)) == [0, 1]
    assert values_of(LazyH5DataModule(path, x_key="x", segments="#refs*", **whole)) == [2]


@pytest.mark.parametrize("key", ["{split}/*/x", "{split}/d0/x", "all/x_{split}"])
def test_a_split_of_another_spelling_is_a_warning_that_shows_the_link_to_write(tmp_path, key):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        for split in ("train", "valid"):
            for at in range(2):
                file[f"{split}/d{at}/x"] = np.zeros((3, 2))
            file[f"all/x_{split}"] = np.zeros((3, 2))
    wanted, other = ("all/x_val", "all/x_valid") if key.startswith("all") else ("val", "valid")
    with pytest.warns(UserWarning, match=rf"file\['{wanted}'\] = h5py.SoftLink\('/{other}'\)"):
        LazyH5DataModule(path, x_key=key).setup("fit")
    with h5py.File(path, "a") as file:
        file[wanted] = h5py.SoftLink(f"/{other}")
    assert values_of(LazyH5DataModule(path, x_key=key), "val")


def test_a_split_that_lacks_an_array_is_a_warning(tmp_path):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        file["train/x"], file["train/y"], file["val/x"] = np.zeros(3), np.zeros(3), np.zeros(3)
    with pytest.warns(UserWarning, match=r"there is no 'val' split: .* has 'val', but not all arrays"):
        LazyH5DataModule(path, x_key="{split}/x", y_key="{split}/y").setup("fit")


# Segments that lack an array --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["a link to nothing", "damage"])
def test_an_array_that_cannot_be_read_is_an_error_where_missing_ones_are_dropped(tmp_path, trouble):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for at in range(3):
            file[f"d{at}/x"] = np.zeros((3, 2))
            if at != 1:
                file[f"d{at}/y"] = np.zeros(3)
        place = h5py.h5o.get_info(file["d2/y"].id).addr
        if trouble != "damage":
            del file["d2/y"]
            file["d2/y"] = h5py.SoftLink("/gone")
    keys = {"x_key": {"x": "x", "y": "y"}, "segments": {"groups": "d*", "missing": "drop"}, "sample": "segment"}
    if trouble == "damage":
        LazyH5DataModule(str(path), **keys).setup("fit")  # drops d1 alone
        content = bytearray(path.read_bytes())
        content[place : place + 8] = b"\xff" * 8
        path.write_bytes(content)
    with pytest.raises((H5CorruptError, H5KeyError), match="d2/y"):
        LazyH5DataModule(str(path), **keys).setup("fit")


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_group_of_several_names_on_two_levels_is_one_segment(tmp_path, kind):
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        for at in range(4):
            file[f"p{at // 2}/night{at % 2}/x"] = np.full((3, 2), at, "f4")
        for name, target in (("best", "p1"), ("p0/first", "p0/night0"), ("p0/other", "p1/night0")):
            file[name] = file[target] if kind == "hard" else h5py.SoftLink(f"/{target}")
    module = LazyH5DataModule(path, x_key="x", segments="*/*", sample="segment", shuffle=False, batch_size=9)
    assert values_of(module) == [0, 1, 2, 3]
