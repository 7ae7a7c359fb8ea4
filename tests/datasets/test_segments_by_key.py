"""Whole groups of rows as samples: the rows that h5py has, in their order, padded; split, resumed and validated."""

import pickle

import h5py
import numpy as np
import pytest
import torch
from arguments import nested, nested_files
from factories import Stored
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_models import Recorder, SaveOnException, quiet_trainer, together
from tiers import examples

from lightning_h5 import CombinedHDF5DataModule, H5Error, H5ValueError
from lightning_h5.datasets import CombinedHDF5Dataset
from lightning_h5.options import SegmentOptions
from lightning_h5.samples.segment_cuts import by_value

FIELDS = ("x", "wide", "count", "note")


def arrays_of(n_rows, n_groups, seed):
    """Rows of groups that are scattered over the file, each with a step of its own in its group."""
    random = np.random.default_rng(seed)
    groups = random.integers(0, n_groups, n_rows)
    return {
        "x": random.normal(size=(n_rows, 3)).astype("f4"),
        "wide": random.normal(size=(n_rows, 2, 4)).astype("f4"),
        "count": random.integers(-9, 9, n_rows),
        "note": [f"note {number} ü" for number in range(n_rows)],
        "guid": [f"patient_{group}" for group in groups],
        "step": random.permutation(n_rows).astype("f8"),
    }


def write(make_h5, arrays, n_files=1):
    paths = []
    for part in np.array_split(np.arange(len(arrays["x"])), n_files):
        given_arrays = {
            name: np.asarray(values, object if name in ("note", "guid") else None)[part]
            for name, values in arrays.items()
        }
        x = Stored(given_arrays.pop("x"), "chunked", (4, 3), {"compression": "gzip"})
        texts = {name: Stored(given_arrays.pop(name), dtype=h5py.string_dtype()) for name in ("note", "guid")}
        paths.append(make_h5(x=x, **given_arrays, **texts))
    return paths


def by_h5py(paths, order="step"):
    """For each group, in the order of its first rows, what h5py has of it."""
    columns = {}
    for path in paths:
        with h5py.File(path) as file:
            for name in file:
                values = file[name].asstr()[:] if file[name].dtype.kind == "O" else file[name][:]
                columns.setdefault(name, []).append(values)
    columns = {name: np.concatenate(parts) for name, parts in columns.items()}
    found = []
    for guid in dict.fromkeys(columns["guid"]):
        rows = np.flatnonzero(columns["guid"] == guid)
        if order is not None:
            rows = rows[np.argsort(columns[order][rows], kind="stable")]
        found.append({name: values[rows] for name, values in columns.items()})
    return found


def sequences(paths, order="step", **options):
    segments = {"key": "guid", "sort_key": order}
    return CombinedHDF5Dataset(paths, **nested_files(segments=segments, collate_fn="pad", **options))


def check_batch(batch, expected):
    """A padded batch has each sequence as h5py has it, and nothing but zeros behind its end."""
    lengths = [len(one["x"]) for one in expected]
    steps = max(lengths)
    assert batch["length"].tolist() == lengths
    assert batch["guid"] == [one["guid"][0] for one in expected]
    for name in FIELDS:
        assert len(batch[name]) == len(expected)
        for padded, one in zip(batch[name], expected, strict=True):
            length = len(one[name])
            if name == "note":
                assert list(padded) == list(one[name])
            else:
                assert padded.shape == (steps, *one[name].shape[1:])
                assert padded.numpy()[:length].tobytes() == one[name].tobytes()
                assert not padded[length:].any()


def check_sample(sample, one):
    assert sample["guid"] == one["guid"][0]
    assert list(sample["note"]) == list(one["note"])
    for name in ("x", "wide", "count"):
        assert sample[name].numpy().tobytes() == one[name].tobytes()


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99), st.booleans(), st.data())
@settings(max_examples=examples(40))
def test_sequences_are_what_h5py_has_of_each_group_in_its_order(make_h5, n_rows, n_groups, n_files, seed, sorts, data):
    paths = write(make_h5, arrays_of(n_rows, n_groups, seed), min(n_files, n_rows))
    order = "step" if sorts else None
    expected, dataset = by_h5py(paths, order), sequences(paths, order)
    assert len(dataset) == len(expected)
    assert dataset.table.indexer.segments.lengths.tolist() == [len(one["x"]) for one in expected]
    asked = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=6))
    check_batch(dataset.read_batch(asked), [expected[number] for number in asked])
    for sample, number in zip(dataset.__getitems__(asked), asked, strict=True):
        check_sample(sample, expected[number])
    check_sample(dataset[-1], expected[-1])
    dataset.close()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_rows_of_equal_order_keep_that_of_storage(groups, data):
    order = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(groups), max_size=len(groups))))
    groups = np.array(groups)
    firsts, lengths, rows = by_value(groups, order, SegmentOptions(key="group", sort_key="order"))
    rows = np.arange(len(groups)) if rows is None else rows
    found = [rows[first : first + length].tolist() for first, length in zip(firsts, lengths, strict=True)]
    assert found == [
        sorted(np.flatnonzero(groups == group).tolist(), key=lambda row: (order[row], row))
        for group in dict.fromkeys(groups.tolist())
    ]


@pytest.fixture
def paths(make_h5):
    return write(make_h5, arrays_of(90, 14, 5), 2)


def module(paths, **options):
    options = {"sequence_key": "guid", "sequence_order": "step", "batch_size": 4, "collate_fn": "pad"} | options
    return CombinedHDF5DataModule(paths, **nested(**options))


def fitted(paths, **options):
    datamodule = module(paths, **options)
    datamodule.setup("fit")
    return datamodule


def sequence_numbers(batches):
    return [number for batch in batches for number in batch["index"].tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_data_module_are_those_of_h5py_also_from_workers(paths, num_workers):
    expected = by_h5py(paths)
    datamodule = fitted(paths, num_workers=num_workers, with_index=True, persistent_workers=False)
    batches = list(datamodule.train_dataloader())
    for batch in batches:
        check_batch(batch, [expected[number] for number in batch["index"].tolist()])
    assert sorted(sequence_numbers(batches)) == list(range(len(expected)))
    again = list(fitted(paths, with_index=True).train_dataloader())
    assert sequence_numbers(batches) == sequence_numbers(again)


def test_an_identity_is_of_the_rows_and_of_which_make_which_sequence(paths):
    assert sequences(paths).identity() == sequences(paths).identity() != sequences(paths, None).identity()
    assert sequences(paths).identity() != sequences(paths[:1]).identity()


def centred(sample):
    """Works on the whole sequence: a field a step, one for each sequence, text, and one that is no tensor."""
    assert sample["x"].shape[0] == len(sample["note"]) == len(sample["count"])
    return {
        "x": sample["x"] - sample["x"].mean(0),
        "last": sample["wide"][-1],
        "name": sample["guid"],
        "note": sample["note"],
        "n": len(sample["x"]),
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_gets_whole_sequences(paths, num_workers):
    expected = by_h5py(paths)
    datamodule = fitted(paths, transform=centred, with_index=True, num_workers=num_workers, persistent_workers=False)
    for batch in datamodule.train_dataloader():
        ones = [expected[number] for number in batch["index"].tolist()]
        assert batch["length"].tolist() == list(batch["n"]) == [len(one["x"]) for one in ones]
        assert batch["name"] == [one["guid"][0] for one in ones]
        assert [list(notes) for notes in batch["note"]] == [list(one["note"]) for one in ones]
        assert np.array_equal(batch["last"].numpy(), [one["wide"][-1] for one in ones])
        for padded, one in zip(batch["x"], ones, strict=True):
            n = len(one["x"])
            centre = torch.from_numpy(one["x"])
            assert torch.equal(padded[:n], centre - centre.mean(0))
            assert not padded[n:].any()


def first_steps(sample):
    return {"x": sample["x"][: len(sample["x"]) // 2 + 1]}


def test_a_transform_may_take_another_part_of_each_sequence(make_h5):
    arrays = arrays_of(12, 1, 0)
    arrays["guid"] = ["a"] * 8 + ["b"] * 4
    batch = sequences(write(make_h5, arrays), transform=first_steps).read_batch([0, 1])
    assert batch["length"].tolist() == [5, 3]
    assert batch["x"].shape[:2] == (2, 5)
    assert not batch["x"][1, 3:].any()


def longest(samples):
    return max(len(sample["x"]) for sample in samples), [sample["guid"] for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_gets_samples_that_are_not_padded(paths, num_workers):
    expected = {one["guid"][0]: len(one["x"]) for one in by_h5py(paths)}
    datamodule = fitted(paths, collate_fn=longest, num_workers=num_workers, persistent_workers=False)
    seen = []
    for length, guids in datamodule.train_dataloader():
        assert length == max(expected[guid] for guid in guids)
        seen += guids
    assert sorted(seen) == sorted(expected)


def as_they_are(samples):
    return samples


def test_a_collate_fn_gets_each_samples_index_where_it_is_asked_for(paths):
    expected = by_h5py(paths)
    datamodule = fitted(paths, collate_fn=as_they_are, with_index=True)
    samples = [sample for batch in datamodule.train_dataloader() for sample in batch]
    for sample in samples:
        check_sample(sample, expected[int(sample["index"])])


def noisy(sample, rng):
    return sample | {"noise": torch.from_numpy(rng.normal(size=len(sample["x"])))}


def test_what_a_transform_draws_follows_the_sequence_and_not_the_batch(paths):
    found = []
    for options in ({"batch_size": 4}, {"batch_size": 3, "shuffle": False}, {"num_workers": 2}):
        datamodule = fitted(paths, transform=noisy, **options, persistent_workers=False)
        noise = {}
        for batch in datamodule.train_dataloader():
            for guid, values, n in zip(batch["guid"], batch["noise"], batch["length"].tolist(), strict=True):
                noise[guid] = values[:n].tolist()
        found.append(noise)
    assert found[0] == found[1] == found[2]
    assert len({values[0] for values in found[0].values()}) == len(found[0])


# What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["guid", "step"])
def test_a_missing_group_or_order_is_refused_with_the_column_and_how_many(make_h5, column):
    arrays = arrays_of(20, 3, 0)
    for row in (4, 11):
        arrays[column][row] = "" if column == "guid" else np.nan
    with pytest.raises(H5ValueError, match=rf"'{column}' has no value .* in 2 of 20 rows, first in row 4"):
        fitted(write(make_h5, arrays))


def test_a_group_that_is_nan_is_refused(make_h5):
    groups = np.repeat([1.0, 2.0, np.nan], 5)
    path = make_h5(x=np.zeros((15, 2)), group=groups)
    with pytest.raises(H5ValueError, match=r"'group' has no value .* in 5 of 15 rows, first in row 10"):
        fitted(path, segments={"key": "group", "sort_key": None})


def test_rows_without_a_group_can_be_left_out_by_a_filter(make_h5):
    path = make_h5(x=np.zeros((15, 2)), group=np.repeat([1.0, 2.0, np.nan], 5))
    datamodule = fitted(path, segments={"key": "group", "sort_key": None}, where={"group": {"min": 0}})
    (batch,) = datamodule.train_dataloader()
    assert sorted(batch["group"].tolist()) == [1.0, 2.0]
    assert batch["length"].tolist() == [5, 5]


REFUSED = {
    "an order without a key": ({"sequence_key": None}, r"segments.sort_key=.* was given without segments.key"),
    "an order of text": ({"sequence_order": "note"}, r"segments.sort_key='note' has values of"),
    "kept rows": ({"cache_size": 4}, r"row_cache caches single rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_contradict_sequences_are_refused(paths, case):
    options, text = REFUSED[case]
    with pytest.raises(H5ValueError, match=text):
        fitted(paths, **options)


def test_a_split_file_that_cuts_sequences_apart_is_refused(paths, tmp_path):
    plan = tmp_path / "splits.json"
    CombinedHDF5DataModule(
        paths,
        split={"val_fraction": 0.3, "file": plan},
    ).setup("fit")
    with pytest.raises(H5ValueError):
        fitted(paths, split={"file": plan})


# Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"val_fraction": 0.2, "test_fraction": 0.2}, {"num_folds": 3, "fold": 1}])
def test_splits_keep_sequences_whole_and_evaluation_has_each_once(paths, options):
    expected = by_h5py(paths)
    datamodule = module(paths, split={"group_key": "guid"}, with_index=False, **options)
    datamodule.setup()
    loaders = [datamodule.train_dataloader(), datamodule.val_dataloader()]
    loaders += [datamodule.test_dataloader()] if "test_fraction" in options else []
    seen = {}
    for loader in loaders:
        for batch in loader:
            for guid, length in zip(batch["guid"], batch["length"].tolist(), strict=True):
                assert guid not in seen
                seen[guid] = length
    assert seen == {one["guid"][0]: len(one["x"]) for one in expected}


class GuidRecorder(Recorder):
    """Remembers the numbers of the patients it sees."""

    def training_step(self, batch, batch_idx):
        return super().training_step(numbers(batch), batch_idx)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            super().validation_step(numbers(batch), batch_idx)


def numbers(batch):
    return {"index": torch.tensor([int(guid.removeprefix("patient_")) for guid in batch["guid"]])}


KINDS = {
    "bucketed": {},
    "bucketed in chunks": {"shuffle": "chunks", "shuffle_bytes": "1 KiB"},
    "not bucketed": {"bucket_by_length": False},
    "in storage order": {"shuffle": False},
    "with workers": {"num_workers": 2},
}


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_in_the_middle_of_an_epoch_goes_on_as_an_unbroken_one(paths, tmp_path, kind):
    def data():
        return module(paths, split={"group_key": "guid", "val_fraction": 0.2}, batch_size=2, **KINDS[kind])

    whole, broken, resumed = GuidRecorder(), GuidRecorder(fail_at=(1, 3)), GuidRecorder()
    quiet_trainer(max_epochs=3, num_sanity_val_steps=0).fit(whole, datamodule=data())
    saving = SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=3, callbacks=[saving]).fit(broken, datamodule=data())
    quiet_trainer(max_epochs=3, num_sanity_val_steps=0).fit(resumed, datamodule=data(), ckpt_path=saving.path)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows
    epochs = [sorted(rows) for rows in whole.train_rows.values()]
    assert epochs == [epochs[0]] * 3
    assert len(epochs[0]) == len(set(epochs[0]))
    evaluated = whole.rows["val"]
    assert sorted(evaluated) == sorted([*set(evaluated)] * 3)
    assert not set(evaluated) & set(epochs[0])
    orders = list(whole.train_rows.values())
    assert (orders[0] == orders[1]) == (kind == "in storage order")


def test_without_shuffling_sequences_come_in_the_order_of_storage(paths):
    expected = by_h5py(paths)
    loader = fitted(paths, shuffle=False).train_dataloader()
    assert [guid for batch in loader for guid in batch["guid"]] == [one["guid"][0] for one in expected]


def uneven(make_h5):
    """A file of 300 patients with 1 to 80 rows each."""
    lengths = np.clip(np.random.default_rng(4).lognormal(2, 0.8, 300), 1, 80).astype(int)
    groups = np.repeat(np.arange(300), lengths)
    return make_h5(x=np.arange(len(groups), dtype="f4"), group=groups), lengths


def test_bucketed_batches_have_little_padding_and_others_have_more(make_h5):
    path, lengths = uneven(make_h5)

    def padding(**options):
        segments = {"key": "group", "sort_key": None, "bucket": True} | options
        loader = fitted(path, segments=segments, batch_size=8).train_dataloader()
        batches, len_of_all = list(loader), int(lengths.sum())
        assert sorted(number for batch in batches for number in batch["group"].tolist()) == list(range(300))
        for batch in batches:
            assert batch["length"].tolist() == lengths[batch["group"].numpy()].tolist()
        return 1 - len_of_all / sum(batch["x"].numel() for batch in batches)

    assert padding() < 0.08
    assert padding(bucket=False) > 0.3


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_each_sequence_once_between_them_with_equal_steps(make_h5, world_size):
    path, _ = uneven(make_h5)
    options = {"sequence_key": "group", "sequence_order": None, "batch_size": 16}
    seen, steps = [], []
    for rank in range(world_size):
        loader = fitted(path, rank=rank, world_size=world_size, **options).train_dataloader()
        batches = list(loader)
        assert len(batches) == len(loader)
        steps.append(len(batches))
        seen += [number for batch in batches for number in batch["group"].tolist()]
    assert len(set(steps)) == 1
    assert sorted(seen) == list(range(300))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_evaluate_each_sequence_once_between_them(paths, world_size):
    expected, seen = by_h5py(paths), []
    for rank in range(world_size):
        datamodule = module(None, val_path=paths, rank=rank, world_size=world_size)
        datamodule.setup("validate")
        seen += [guid for batch in datamodule.val_dataloader() for guid in batch["guid"]]
    assert seen == [one["guid"][0] for one in expected]


def test_overfitting_repeats_the_same_batches(paths):
    model = GuidRecorder()
    quiet_trainer(max_epochs=3, overfit_batches=2).fit(model, datamodule=module(paths))
    first, second, third = model.train_rows.values()
    assert first == second == third
    assert len(first) == 8


def bucketed(paths, **options):
    return module(paths, bucket_by_length=True, **options)


def test_the_rest_of_a_bucketed_epoch_goes_on_in_batches_of_the_size_it_began_with(paths, tmp_path):
    saving = SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[saving]).fit(GuidRecorder(fail_at=(0, 2)), datamodule=bucketed(paths, batch_size=2))
    with pytest.raises(H5Error, match="batch_size=2"):
        quiet_trainer().fit(GuidRecorder(), datamodule=bucketed(paths, batch_size=3), ckpt_path=saving.path)


def test_filters_leave_the_rows_of_a_sequence_that_pass(paths):
    datamodule = fitted(paths, where={"count": {"min": 0}})
    expected = {one["guid"][0]: one["step"][one["count"] >= 0] for one in by_h5py(paths)}
    found = {}
    for batch in datamodule.train_dataloader():
        for guid, steps, length in zip(batch["guid"], batch["step"], batch["length"].tolist(), strict=True):
            found[guid] = steps[:length].tolist()
    assert found == {guid: steps.tolist() for guid, steps in expected.items() if len(steps)}


def test_batches_that_are_kept_are_never_written_to(paths):
    datamodule = fitted(paths, with_index=True)
    kept = list(datamodule.train_dataloader())
    copies = [{name: torch.clone(v) for name, v in b.items() if isinstance(v, torch.Tensor)} for b in kept]
    list(datamodule.train_dataloader())
    for batch, copy in zip(kept, copies, strict=True):
        assert all(torch.equal(batch[name], value) for name, value in copy.items())


def sequences_of(path, **options):
    module = CombinedHDF5DataModule(path, **nested(sequence_key="g", batch_size=2, collate_fn="pad", **options))
    module.setup("fit")
    return list(module.train_dataloader())


def test_a_transform_may_take_a_part_of_each_sequence(make_h5):
    path = make_h5({"x": np.arange(24.0).reshape(12, 2), "g": np.repeat(np.arange(3), [3, 4, 5])})
    for batch in sequences_of(path, transform=lambda sample: {**sample, "x": sample["x"][-2:]}, fields=["x"]):
        assert batch["x"].shape[1:] == (2, 2)
        assert set(batch["length"].tolist()) == {2}


@pytest.mark.parametrize("dtype", ["u2", "u4", "u8", "?"])
def test_sequences_have_fields_of_any_dtype(make_h5, dtype):
    values = np.arange(12).astype(dtype)
    path = make_h5({"x": values, "g": np.repeat(np.arange(3), 4)})
    found = {
        int(group): x.numpy() for batch in sequences_of(path) for group, x in zip(batch["g"], batch["x"], strict=True)
    }
    assert all(found[group].tolist() == values[4 * group : 4 * group + 4].tolist() for group in range(3))


@pytest.mark.parametrize("options", [{"sequence_key": "wide"}, {"sequence_key": "g", "sequence_order": "wide"}])
def test_columns_with_axes_make_no_sequences(make_h5, options):
    path = make_h5({"x": np.arange(12.0), "g": np.repeat(np.arange(3), 4), "wide": np.zeros((12, 2))})
    with pytest.raises(H5ValueError, match="'wide'"):
        CombinedHDF5DataModule(path, **nested(**options)).setup("fit")


def test_a_sampler_of_sequences_is_pickled_also_after_its_use(make_h5):
    path = make_h5({"x": np.arange(12.0), "g": np.repeat(np.arange(3), 4)})
    module = CombinedHDF5DataModule(path, segments={"key": "g", "bucket": True}, batch_size=2, collate_fn="pad")
    module.setup("fit")
    loader = module.train_dataloader()
    n_steps = len(loader)
    assert len(pickle.loads(pickle.dumps(loader.sampler))) == n_steps


def test_the_group_may_be_named_by_its_array(make_h5):
    path = make_h5({"x": np.arange(12.0), "t": np.repeat(np.arange(3), 4)})
    module = CombinedHDF5DataModule(
        path, fields={"x": "x", "pat": "t"}, segments={"key": "t", "bucket": True}, batch_size=3, collate_fn="pad"
    )
    module.setup("fit")
    assert all(batch["pat"].ndim == 1 for batch in module.train_dataloader())
