"""``collate_fn="pack"``: samples joined along their steps, with the boundaries that variable-length attention takes."""

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset

KINDS = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]
LENGTHS = [5, 3, 9, 1, 7, 4, 6, 2]
SEGMENTS = {"groups": "data/*"}


@pytest.fixture
def path(tmp_path):
    """Episodes with one observation more than actions, a channel axis before the steps, and values of their own."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "episodes.h5", "w") as file:
        for number, n in enumerate(LENGTHS):
            group = file.create_group(f"data/demo_{number}")
            group["action"] = rng.normal(size=(n, 2)).astype("f4")
            group["observation"] = rng.normal(size=(n + 1, 3)).astype("f4")
            group["signal"] = rng.normal(size=(2, n)).astype("f4")
            group["label"] = np.arange(n)
            group["word"] = [f"{number} {step}" for step in range(n)]
            group["task"] = np.int64(number)
            group["goal"] = np.full(4, number, "f4")
        file["counts"] = np.array([2, 0, 3])
        tokens = file.create_dataset("tokens", (len(LENGTHS),), h5py.vlen_dtype("i4"))
        for number, n in enumerate(LENGTHS):
            tokens[number] = np.arange(n) + 10 * number
        file["class"] = np.arange(len(LENGTHS))
    return str(tmp_path / "episodes.h5")


def stored(path, name, numbers):
    with h5py.File(path) as file:
        return [file[f"data/demo_{number}/{name}"][()] for number in numbers]


def batches_of(path, kind=LazyH5DataModule, **options):
    module = kind(path, collate_fn="pack", **{"batch_size": 3, "with_index": True, "segments": SEGMENTS} | options)
    module.setup("fit")
    yield from module.train_dataloader()
    module.teardown("fit")


def assert_ends(batch, lengths, prefix=""):
    ends = batch[f"{prefix}cu_seqlens"]
    assert ends.dtype == torch.int32
    assert ends.tolist() == [0, *np.cumsum(lengths)]
    assert type(batch[f"{prefix}max_seqlen"]) is int
    assert batch[f"{prefix}max_seqlen"] == max(lengths)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_each_other_along_their_steps(path, kind, num_workers):
    fields = ["action", "signal", "label", "word", "task", "goal"]
    segments = SEGMENTS | {"step_axis": {"signal": 1}, "constants": ["task", "goal"]}
    batches = list(batches_of(path, kind, fields=fields, segments=segments, x_dtype=None, num_workers=num_workers))
    assert sorted(number for batch in batches for number in batch["index"].tolist()) == list(range(len(LENGTHS)))
    for batch in batches:
        numbers = batch["index"].tolist()
        for name, axis in (("action", 0), ("signal", 1), ("label", 0)):
            np.testing.assert_array_equal(batch[name], np.concatenate(stored(path, name, numbers), axis))
        assert batch["word"] == [word.decode() for words in stored(path, "word", numbers) for word in words]
        np.testing.assert_array_equal(batch["task"], numbers)
        np.testing.assert_array_equal(batch["goal"], np.stack(stored(path, "goal", numbers)))
        assert_ends(batch, [LENGTHS[number] for number in numbers])
        assert batch["segment"] == [f"data/demo_{number}" for number in numbers]


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_with_other_numbers_of_steps_has_boundaries_of_its_own(path, kind):
    for batch in batches_of(path, kind, fields=["action", "observation"]):
        numbers = batch["index"].tolist()
        np.testing.assert_array_equal(batch["observation"], np.concatenate(stored(path, "observation", numbers)))
        assert_ends(batch, [LENGTHS[number] for number in numbers])
        assert_ends(batch, [LENGTHS[number] + 1 for number in numbers], "observation_")
        assert "action_cu_seqlens" not in batch


def test_input_and_target_are_followed_by_the_boundaries(path):
    for x, y, ends, longest, index, *_ in batches_of(path, x_key="action", y_key="label"):
        lengths = [LENGTHS[number] for number in index]
        assert (len(x), len(y), longest) == (sum(lengths), sum(lengths), max(lengths))
        assert ends.tolist() == [0, *np.cumsum(lengths)]


def test_segments_of_one_length_are_joined_too(path, make_h5):
    same = make_h5({"x": np.arange(24.0).reshape(6, 4), "n": np.array([2, 2, 2])})
    (batch,) = batches_of(same, x_key={"x": "x"}, segments={"lengths": "n"}, shuffle=False, x_dtype=None)
    np.testing.assert_array_equal(batch["x"], np.arange(24.0).reshape(6, 4))
    assert_ends(batch, [2, 2, 2])


def test_cropped_samples_are_joined_as_they_are_cropped(path):
    for batch in batches_of(path, fields=["action", "observation"], segments=SEGMENTS | {"max_length": 4}):
        lengths = [LENGTHS[number] for number in batch["index"].tolist()]
        assert_ends(batch, np.minimum(lengths, 4))
        assert_ends(batch, np.minimum(np.add(lengths, 1), 4), "observation_")


def test_lists_of_numbers_are_joined(path):
    for x, y, ends, _ in batches_of(path, x_key="tokens", y_key="class", segments=None, with_index=False):
        samples = x.tensor_split(ends[1:-1].long())
        for sample, number in zip(samples, y.tolist(), strict=True):
            np.testing.assert_array_equal(sample, np.arange(LENGTHS[number]) + 10 * number)


def test_what_a_transform_adds_is_joined_if_it_has_as_many_steps(path):
    def transform(sample):
        return sample | {"mask": sample["action"][:, 0] > 0, "mean": sample["action"].mean(0), "n": len(sample["word"])}

    for batch in batches_of(path, fields=["action", "word"], transform=transform):
        numbers = batch["index"].tolist()
        actions = stored(path, "action", numbers)
        np.testing.assert_array_equal(batch["mask"], np.concatenate(actions)[:, 0] > 0)
        assert batch["mean"].shape == (len(numbers), 2)
        assert batch["n"].tolist() == [LENGTHS[number] for number in numbers]
        assert_ends(batch, [LENGTHS[number] for number in numbers])


@pytest.mark.parametrize("returned", [dict, tuple])
def test_a_transform_may_make_several_fields_of_one(path, returned):
    def transform(action):
        pair = (action[1:] if len(action) > 1 else action, torch.zeros(2))
        return pair if returned is tuple else {"later": pair[0], "zeros": pair[1]}

    for batch in batches_of(path, x_key="action", transform=transform):
        x, ends, _, index, *_ = batch if returned is tuple else (batch, batch["cu_seqlens"], 0, batch["index"])
        later, zeros = x if returned is tuple else (x["later"], x["zeros"])
        lengths = [max(1, LENGTHS[number] - 1) for number in index.tolist()]
        assert (len(later), tuple(zeros.shape)) == (sum(lengths), (len(lengths), 2))
        assert ends.tolist() == [0, *np.cumsum(lengths)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x_key": "action", "y_key": "label", "transform": lambda x: x[:1]}, "'action' has 1 steps in a sample and"),
        ({"x_key": "class", "segments": None}, "samples here are rows, which all have the same number of steps"),
        ({"fields": ["action"], "window": 2}, "samples here are windows"),
        ({"fields": {"max_seqlen": "action"}}, "the data has fields named 'max_seqlen'"),
        ({"x_key": "action", "transform": lambda x: x[:, : len(x)]}, "cannot be joined"),
    ],
)
def test_what_cannot_be_joined_is_an_error(path, options, message):
    with pytest.raises(H5ValueError, match=message):
        list(batches_of(path, **options))


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset, CombinedHDF5Dataset])
def test_datasets_join_samples_of_a_batch_and_give_single_ones_as_they_are(path, kind):
    keys = ({"action": "action"},) if kind is not CombinedHDF5Dataset else (["action"],)
    dataset = kind(path, *keys, segments=SEGMENTS, collate_fn="pack")
    if kind is RankMemCachedH5Dataset:
        dataset.load()
    batch = dataset.read_batch([2, 0])
    np.testing.assert_array_equal(batch["action"], np.concatenate(stored(path, "action", [2, 0])))
    assert_ends(batch, [9, 5])
    np.testing.assert_array_equal(dataset[2]["action"], stored(path, "action", [2])[0])
    assert dataset.read_batch([])["cu_seqlens"].tolist() == [0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_over_a_packed_batch_is_that_of_each_sample(path):
    """With nested tensors, whose boundaries are these."""
    (batch,) = batches_of(path, fields=["action"], batch_size=8)
    ends, longest = batch["cu_seqlens"], batch["max_seqlen"]
    heads = torch.nn.Linear(2, 8)(batch["action"]).detach().view(-1, 2, 4)
    nested = torch.nested.nested_tensor_from_jagged(heads, ends.long(), max_seqlen=longest).transpose(1, 2)
    joined = torch.nn.functional.scaled_dot_product_attention(nested, nested, nested).transpose(1, 2).values()
    for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        one = heads[low:high].transpose(0, 1)
        alone = torch.nn.functional.scaled_dot_product_attention(one, one, one).transpose(0, 1)
        torch.testing.assert_close(joined[low:high], alone)
