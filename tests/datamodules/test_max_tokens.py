"""``segments.max_tokens``: batches of at most so many steps, in all data modules, stages and numbers of ranks."""

import h5py
import numpy as np
import pytest
import torch
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule

KINDS = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]
LENGTHS = np.clip(np.random.default_rng(1).lognormal(2.5, 0.6, 150), 2, 60).astype(int)
MAX_TOKENS = 128


@pytest.fixture
def path(tmp_path):
    """Sequences as ranges of compressed rows, each with its own number."""
    with h5py.File(tmp_path / "sequences.h5", "w") as file:
        owners = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        file.create_dataset("x", data=owners, compression="gzip")
        file["n"], file["w"], file["ids"] = LENGTHS, np.ones(len(LENGTHS)), owners
    return str(tmp_path / "sequences.h5")


def module_of(path, kind=LazyH5DataModule, **options):
    segments = {"lengths": "n", "max_tokens": MAX_TOKENS} | options.pop("segments", {})
    return kind(path, **{"fields": ["x"], "segments": segments, "collate_fn": "pad", "with_index": True} | options)


def n_steps(batch, packs=False):
    if packs:
        return len(batch["x"])
    return len(batch["index"]) * int(LENGTHS[batch["index"].numpy()].max())


def batches_of(path, kind, world_size, stage="train", **options):
    """The batches of each rank, one list each."""
    of_ranks = []
    for rank in range(world_size):
        module = module_of(path, kind, distributed={"rank": rank, "world_size": world_size}, **options)
        module.setup("fit")
        loader = getattr(module, f"{stage}_dataloader")()
        of_ranks.append(list(loader))
        assert len(of_ranks[-1]) == len(loader)
        module.teardown("fit")
    return of_ranks


@pytest.mark.parametrize(("world_size", "shuffle"), [(1, "chunks"), (3, "global"), (3, False)])
@pytest.mark.parametrize("collate", ["pad", "pack", "list"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_all_ranks_keep_the_limit(path, kind, collate, world_size, shuffle):
    of_ranks = batches_of(path, kind, world_size, collate_fn=collate, shuffle=shuffle)
    assert len({len(batches) for batches in of_ranks}) == 1
    batches = [batch for batches in of_ranks for batch in batches]
    assert max(n_steps(batch, collate == "pack") for batch in batches) <= MAX_TOKENS
    assert sorted(number for batch in batches for number in batch["index"].tolist()) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_validation_keep_the_limit_too(path, kind, world_size):
    of_ranks = batches_of(path, kind, world_size, "val", split=0.4, collate_fn="pad")
    assert len({len(batches) for batches in of_ranks}) == 1
    assert max(batch["x"].numel() for batches in of_ranks for batch in batches) <= MAX_TOKENS
    numbers = [number for batches in of_ranks for batch in batches for number in batch["index"].tolist()]
    assert numbers == list(range(60))


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_and_not_the_default_batch_size_decides(path, kind):
    (batches,) = batches_of(path, kind, 1, segments={"max_tokens": 1_024}, collate_fn="pack")
    sizes = [len(batch["index"]) for batch in batches]
    assert max(sizes) > 32
    assert np.mean([len(batch["x"]) for batch in batches[:-1]]) > 0.9 * 1_024


@pytest.mark.parametrize("kind", KINDS)
def test_another_batch_size_is_the_most_samples(path, kind):
    (batches,) = batches_of(path, kind, 1, batch_size=4, collate_fn="pack")
    assert max(len(batch["index"]) for batch in batches) == 4
    (batches,) = batches_of(path, kind, 1, "val", split=0.4, eval_batch_size=3, collate_fn="pack")
    assert max(len(batch["index"]) for batch in batches) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_cropped_samples_count_the_steps_that_are_left(path, kind):
    (batches,) = batches_of(path, kind, 1, segments={"max_tokens": 64, "max_length": 8}, collate_fn="pack")
    assert max(batch["max_seqlen"] for batch in batches) == 8
    assert 64 >= max(len(batch["x"]) for batch in batches) > 60


def test_the_field_with_the_most_steps_counts(tmp_path):
    with h5py.File(tmp_path / "episodes.h5", "w") as file:
        for number in range(20):
            file[f"demo_{number}/action"], file[f"demo_{number}/state"] = np.zeros(9), np.zeros(10)
    segments = {"groups": "demo_*", "max_tokens": 90}
    module = LazyH5DataModule(tmp_path / "episodes.h5", fields=["action", "state"], segments=segments, collate_fn="pad")
    module.setup("fit")
    assert {tuple(batch["state"].shape) for batch in module.train_dataloader()} <= {(9, 10), (2, 10), (1, 10)}


@pytest.mark.parametrize("kind", KINDS)
def test_without_shuffling_samples_stay_in_their_order(path, kind):
    (batches,) = batches_of(path, kind, 1, shuffle=False)
    assert [number for batch in batches for number in batch["index"].tolist()] == list(range(len(LENGTHS)))
    assert max(map(n_steps, batches)) <= MAX_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_beyond_the_limit_is_named_before_training(path, kind):
    longest = int(LENGTHS.argmax())
    with pytest.raises(H5ValueError, match=rf"{LENGTHS.max()} steps: 'sequences.h5\[{longest}\]'.*'max_length': 40"):
        module_of(path, kind, segments={"max_tokens": 40}).setup("fit")
    module_of(path, kind, segments={"max_tokens": 40, "max_length": 40}).setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "w"}, "max_tokens cannot be combined with weights"),
        ({"segments": {"max_tokens": 0}}, "segments.max_tokens=0"),
        ({"window": 3}, "segments.max_tokens are of whole segments, and samples are windows"),
        ({"segments": {"lengths": None}, "sample": "row"}, "but samples are rows: max_tokens counts the steps"),
        ({"shuffle": {"scope": "node"}}, "shuffle.scope='node' was given with segments.max_tokens"),
        ({"collate_fn": None}, "collate_fn='pad'"),
        (
            {"drop_last": True, "segments": {"max_tokens": 9_000}, "distributed": {"rank": 0, "world_size": 4}},
            "drops all 1 batches",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(path, options, message):
    with pytest.raises(H5ValueError, match=message):
        module_of(path, **options).setup("fit")


MIXTURES = {
    "concat": {},
    "weighted": {"strategy": "weighted", "weights": {"a": 3, "b": 1}, "epoch_length": 8},
    "schedule": {"strategy": "weighted", "weights": {0: [1, 1], 10: [3, 1]}, "between": "linear", "epoch_length": 8},
    "sequential": {"strategy": "sequential"},
}


@pytest.fixture
def mixture(path, tmp_path):
    """Two sources: the sequences, and half as long ones."""
    with h5py.File(tmp_path / "short.h5", "w") as file:
        file.create_dataset("x", data=np.repeat(np.arange(60), LENGTHS[:60] // 2), compression="gzip")
        file["n"] = LENGTHS[:60] // 2
    return lambda name: {"sources": {"a": path, "b": str(tmp_path / "short.h5")}, **MIXTURES[name]}


MIXED_LENGTHS = np.append(LENGTHS, LENGTHS[:60] // 2)


def of_mixture(mixture, name, **options):
    return module_of(None, CombinedHDF5DataModule, mixture=mixture(name), **{"collate_fn": "pack"} | options)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", MIXTURES)
def test_batches_of_a_mixture_are_of_one_source_and_keep_the_limit(mixture, name, world_size):
    batches = []
    for rank in range(world_size):
        module = of_mixture(mixture, name, distributed={"rank": rank, "world_size": world_size})
        module.setup("fit")
        batches.append(list(module.train_dataloader()))
    assert len(set(map(len, batches))) == 1
    for batch in (batch for of_rank in batches for batch in of_rank):
        assert len(batch["x"]) == MIXED_LENGTHS[batch["index"].numpy()].sum() <= MAX_TOKENS
        assert name == "concat" or len(set(batch["source"])) == 1
    numbers = [number for of_rank in batches for batch in of_rank for number in batch["index"].tolist()]
    if name in ("concat", "sequential"):
        assert sorted(numbers) == list(range(len(MIXED_LENGTHS)))
    if name == "weighted":
        assert sum(batch["source"][0] == "a" for of_rank in batches for batch in of_rank) == 6 * world_size


@pytest.mark.parametrize("collate", ["pad", "pack"])
def test_validation_on_a_mixture_keeps_the_limit(mixture, collate):
    module = of_mixture(mixture, "weighted", split=0.4, collate_fn=collate)
    module.setup("fit")
    batches = list(module.val_dataloader())
    assert max(batch["x"].numel() for batch in batches) <= MAX_TOKENS
    assert len(np.unique([number for batch in batches for number in batch["index"].tolist()])) == 84


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_stopped_in_an_epoch_goes_on_with_exactly_the_rest(mixture, tmp_path, name):
    whole, broken, resumed = Recorder(), Recorder(fail_at=(1, 4)), Recorder()
    quiet_trainer(max_epochs=3).fit(whole, datamodule=of_mixture(mixture, name))
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=3, callbacks=[SaveOnException(tmp_path)]).fit(
            broken, datamodule=of_mixture(mixture, name)
        )
    module = of_mixture(mixture, name)
    quiet_trainer(max_epochs=3).fit(resumed, datamodule=module, ckpt_path=tmp_path / "exception.ckpt")
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows
    rows = [sample.index for step in range(len(module.train_dataloader())) for sample in module.rows_of_step(step)]
    assert rows == whole.train_rows[0]


def test_sources_that_take_turns_by_rows_and_other_shards_in_each_epoch_are_refused(path):
    sources = {"sources": {"a": path, "b": path}, "strategy": "round_robin", "mix": "rows"}
    with pytest.raises(
        H5ValueError, match=r"max_tokens cannot be combined with mixture.mix='rows'.*Pass mix='batches'"
    ):
        module_of(None, mixture=sources)
    with pytest.raises(H5ValueError, match="max_tokens cannot be combined with memory"):
        module_of(path, RankCachedH5DataModule, memory={"reshard_every_n_epochs": 1})


@pytest.mark.parametrize("collate", ["pad", "pack"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_in_an_epoch_goes_on_with_exactly_the_rest(path, tmp_path, kind, collate):
    whole, broken, resumed = Recorder(), Recorder(fail_at=(1, 4)), Recorder()
    quiet_trainer(max_epochs=3).fit(whole, datamodule=module_of(path, kind, collate_fn=collate))
    module = module_of(path, kind, collate_fn=collate)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=3, callbacks=[SaveOnException(tmp_path)]).fit(broken, datamodule=module)
    saved = tmp_path / "exception.ckpt"
    quiet_trainer(max_epochs=3).fit(resumed, datamodule=module_of(path, kind, collate_fn=collate), ckpt_path=saved)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows
    for rows in whole.train_rows.values():
        assert sorted(rows) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_other_ranks_go_on_with_the_rest_of_an_epoch(path, world_size):
    def loader_of(rank, of):
        module = module_of(path, collate_fn="pack", distributed={"rank": rank, "world_size": of})
        module.setup("fit")
        return module.train_dataloader()

    numbers, loaders = [], [loader_of(rank, 3) for rank in range(3)]
    for loader in loaders:
        batches = iter(loader)
        numbers += [number for _ in range(2) for number in next(batches)["index"].tolist()]
        state = loader.state_dict()
        del batches
    for rank in range(world_size):
        loader = loader_of(rank, world_size)
        loader.load_state_dict(state)
        batches = list(loader)
        assert max(len(batch["x"]) for batch in batches) <= MAX_TOKENS
        numbers += [number for batch in batches for number in batch["index"].tolist()]
    assert sorted(numbers) == list(range(len(LENGTHS)))


def test_other_limits_do_not_go_on_with_an_epoch(path):
    def loader_of(max_tokens):
        module = module_of(path, segments={"max_tokens": max_tokens})
        module.setup("fit")
        return module.train_dataloader()

    first = loader_of(MAX_TOKENS)
    next(iter(first))
    with pytest.raises(Exception, match=r"at most 128 steps.*at most 256 steps"):
        loader_of(256).load_state_dict(first.state_dict())


def test_single_samples_that_ranks_cannot_share_are_counted_in_the_log(path, caplog):
    with caplog.at_level("INFO"):
        of_ranks = batches_of(path, LazyH5DataModule, 4, segments={"max_tokens": 60}, batch_size=1)
    assert {len(batches) for batches in of_ranks} == {37}
    assert "2 of 150 batches, different ones each epoch, are left out" in caplog.text


def test_a_user_s_own_collate_function_gets_samples_that_would_fit_when_padded(path):
    (batches,) = batches_of(path, LazyH5DataModule, 1, collate_fn=lambda samples: [len(each["x"]) for each in samples])
    assert all(max(lengths) * len(lengths) <= MAX_TOKENS for lengths in batches)
    assert sum(map(len, batches)) == len(LENGTHS)


def test_a_dataset_refuses_the_limit_of_batches(path):
    from lightning_h5.datasets import H5LazyDataset

    with pytest.raises(H5ValueError, match="was given to a dataset"):
        H5LazyDataset(path, "x", segments={"lengths": "n", "max_tokens": 64})


def test_a_configuration_file_says_the_same(path, tmp_path):
    from lightning.pytorch.cli import LightningCLI

    config = tmp_path / "config.yaml"
    config.write_text(
        "seed_everything: 1\n"
        "data:\n"
        "  class_path: lightning_h5.LazyH5DataModule\n"
        "  init_args:\n"
        f"    train_path: {path}\n"
        "    fields: [x]\n"
        "    segments: {lengths: n, max_tokens: 128}\n"
        "    collate_fn: pack\n"
        "    with_index: true\n"
    )
    arguments = ["--config", str(config)]
    cli = LightningCLI(
        Recorder, subclass_mode_data=True, datamodule_class=None, args=arguments, run=False, save_config_callback=None
    )
    cli.datamodule.setup("fit")
    batches = list(cli.datamodule.train_dataloader())
    assert max(len(batch["x"]) for batch in batches) <= MAX_TOKENS
    assert torch.cat([batch["index"] for batch in batches]).sort().values.tolist() == list(range(len(LENGTHS)))
    assert "at most 128 steps a batch" in repr(cli.datamodule)
