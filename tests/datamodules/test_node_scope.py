"""``shuffle.scope="node"`` in data modules and loaders: two nodes, each of which reads its own rows."""

import logging

import numpy as np
import pytest
from factories import Stored
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    RankCachedH5DataModule,
    RankMemCachedH5Dataset,
    ShuffleOptions,
    create_optimized_dataloader,
)
from lightning_h5.__main__ import main

ROWS, WIDTH, PER_CHUNK = 403, 24, 8
BLOCK = PER_CHUNK * WIDTH
CHUNKS = -(-ROWS // PER_CHUNK)
VALUES = np.random.default_rng(0).integers(0, 99, (ROWS, WIDTH), dtype="u1")
STORED = Stored(VALUES, "chunked", (PER_CHUNK, WIDTH), {"compression": "gzip"})

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture
def file(make_h5):
    return make_h5(x=STORED, row=np.arange(ROWS))


@pytest.fixture(params=[1, 2], ids=["one rank a node", "two ranks a node"])
def world_size(request, monkeypatch):
    """Two nodes, as a launcher other than torchrun names them."""
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(request.param))
    return 2 * request.param


def lazy(file, rank, world_size, **options):
    options = {"batch_size": 16, "shuffle": {"scope": "node", "buffer": 20 * BLOCK}} | options
    return LazyH5DataModule(
        file, x_key="x", with_index=True, distributed={"rank": rank, "world_size": world_size}, **options
    )


def combined(file, rank, world_size, **options):
    options = {"batch_size": 16, "shuffle": {"scope": "node", "buffer": 20 * BLOCK}, "x_dtype": None} | options
    return CombinedHDF5DataModule(
        file, with_index=True, distributed={"rank": rank, "world_size": world_size}, **options
    )


def epochs_of(make, file, world_size, n_epochs=3, **options):
    """Rows of each epoch and rank, and the chunks that each rank decodes."""
    rows, decoded = np.empty((n_epochs, world_size), object), np.zeros((n_epochs, world_size))
    for rank in range(world_size):
        datamodule = make(file, rank, world_size, **options)
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
        for epoch in range(n_epochs):
            loader.sampler.set_epoch(epoch)
            before = loader.counters.total()["chunks_decoded"]
            batches = [batch["index"] if isinstance(batch, dict) else batch[-1] for batch in loader]
            rows[epoch, rank] = [row for batch in batches for row in batch.tolist()]
            decoded[epoch, rank] = loader.counters.total()["chunks_decoded"] - before
            assert len(batches) == len(loader)
        datamodule.teardown()
    return rows, decoded


def check(rows, n_rows=ROWS):
    """Each row once an epoch; each node the same rows in every epoch, in another order."""
    per_node = rows.shape[1] // 2
    ranks = [range(node * per_node, (node + 1) * per_node) for node in range(2)]
    nodes = [[[row for rank in of_node for row in epoch[rank]] for epoch in rows] for of_node in ranks]
    for epoch in rows:
        assert sorted(row for of_rank in epoch for row in of_rank) == list(range(n_rows))
    for epochs in nodes:
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
    return [set(epochs[0]) for epochs in nodes]


WAYS = {
    "window": {},
    "global": {"shuffle": {"scope": "node", "mode": "global"}},
    "workers": {"num_workers": 2},
    "drops nothing of small batches": {"batch_size": 3},
    "streams": {"shuffle": {"scope": "node", "mode": "chunks", "buffer": 20 * BLOCK, "streams": 3}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [lazy, combined])
def test_each_node_reads_the_same_rows_in_every_epoch(file, world_size, make, way):
    check(epochs_of(make, file, world_size, **WAYS[way])[0])


def test_windows_are_dealt_to_nodes_too(file, world_size):
    window = {"length": 5, "stride": 1}
    check(epochs_of(lazy, file, world_size, sample="window", window=window)[0], ROWS - 4)


def test_a_node_decodes_its_chunks_alone(file, world_size):
    node, everywhere = (
        epochs_of(
            lazy, file, world_size, files={"cache_bytes": 20 * BLOCK}, shuffle={"scope": scope, "buffer": 20 * BLOCK}
        )[1].sum(axis=1)
        for scope in ("node", "global")
    )
    assert node[0] <= 1.3 * CHUNKS  # the end of an epoch is shuffled together
    assert (node <= everywhere).all()


def test_if_the_rows_of_a_node_fit_later_epochs_decode_nothing(file, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    buffer = VALUES.nbytes // 2 + 4 * BLOCK
    rows, decoded = epochs_of(lazy, file, 2, shuffle={"scope": "node", "buffer": buffer}, files={"cache_bytes": buffer})
    check(rows)
    assert CHUNKS <= decoded[0].sum() <= CHUNKS + 1
    assert decoded[1:].sum() == 0
    everywhere = {"shuffle": {"buffer": buffer}, "files": {"cache_bytes": buffer}}
    assert epochs_of(lazy, file, 2, **everywhere)[1][1:].sum() > CHUNKS / 4


def test_the_log_names_the_rows_of_a_node_and_both_entropies(file, world_size, caplog):
    with caplog.at_level(logging.INFO):
        datamodule = lazy(file, 0, world_size)
        datamodule.setup("fit")
        for _ in range(2):
            datamodule.train_dataloader()
    said = [record.getMessage() for record in caplog.records]
    (order,) = [text for text in said if "training order" in text]
    assert "chunks over the rows of each node, 201 of 403 (dealt to 2 nodes), seed 0" in order
    (entropy,) = [text for text in said if "entropy" in text]
    assert "sorted by 10 labels" in entropy
    assert "with scope='global'" in entropy


def test_the_global_scope_logs_what_it_did(file, caplog):
    with caplog.at_level(logging.INFO):
        datamodule = lazy(file, 0, 1, shuffle={"buffer": 20 * BLOCK})
        datamodule.setup("fit")
        datamodule.train_dataloader()
    assert "chunks over 403 rows, seed 0" in caplog.text
    assert "entropy" not in caplog.text


def test_on_one_node_the_order_is_that_of_the_global_scope(file, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    one, everywhere = (
        epochs_of(lazy, file, 2, 2, shuffle={"scope": scope, "buffer": 20 * BLOCK})[0].tolist()
        for scope in ("node", "global")
    )
    assert one == everywhere
    assert "on one node: the order equals scope='global'" in caplog.text


def test_overfitting_takes_the_same_batches_as_ever(file):
    seen = []
    for scope in ("node", "global"):
        model = Recorder()
        datamodule = LazyH5DataModule(file, x_key="x", with_index=True, shuffle={"scope": scope})
        quiet_trainer(overfit_batches=2).fit(model, datamodule=datamodule)
        seen.append(model.train_rows)
    assert seen[0] == seen[1]


# Loaders without a data module ------------------------------------------------------------------------------------


def test_loaders_of_other_loops_read_the_rows_of_a_node(file, world_size):
    rows = np.empty((3, world_size), object)
    for rank in range(world_size):
        dataset = H5LazyDataset(file, "x", with_index=True)
        shuffle = {"scope": "node", "buffer": 20 * BLOCK}
        loader = create_optimized_dataloader(dataset, 16, rank=rank, world_size=world_size, shuffle=shuffle)
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            rows[epoch, rank] = [row for _, index in loader for row in index.tolist()]
        evaluation = create_optimized_dataloader(dataset, 16, False, rank=rank, world_size=world_size, shuffle=shuffle)
        assert sum(len(x) for x, _ in evaluation) in (ROWS // world_size, ROWS // world_size + 1)
    check(rows)


def test_a_loader_goes_on_with_the_rest_on_other_nodes_and_says_so(file, monkeypatch, caplog):
    def loaders(world_size):
        datasets = [H5LazyDataset(file, "x", with_index=True) for _ in range(world_size)]
        return [
            create_optimized_dataloader(one, 16, rank=rank, world_size=world_size, shuffle={"scope": "node"})
            for rank, one in enumerate(datasets)
        ]

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    seen, states = [], []
    for loader in loaders(2):
        for step, (_, index) in enumerate(loader):
            seen += index.tolist()
            if step == 4:
                states.append(loader.state_dict())
                break
    with caplog.at_level(logging.INFO):
        for loader in loaders(3):
            loader.load_state_dict(states[0])
            seen += [row for _, index in loader for row in index.tolist()]
    assert sorted(seen) == list(range(ROWS))
    assert caplog.text.count("the number of nodes was 2 and is 3: from epoch 1 on") == 1


# Under a Trainer, on one node (two are in ``tests/distributed/test_node_ranks``) ----------------------------------


def test_a_run_on_one_node_goes_on_where_it_was_broken_off(file, tmp_path):
    def fit(fail_at=None, ckpt_path=None):
        model = Recorder(fail_at=fail_at)
        datamodule = LazyH5DataModule(file, x_key="x", with_index=True, shuffle={"scope": "node"}, batch_size=32)
        trainer = quiet_trainer(callbacks=[SaveOnException(tmp_path)])
        if fail_at is None:
            trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
        else:
            with pytest.raises(RuntimeError, match="stop here"):
                trainer.fit(model, datamodule=datamodule)
        return model.train_rows

    before = fit(fail_at=(0, 5))
    (saved,) = tmp_path.glob("*.ckpt")
    assert together(before, fit(ckpt_path=saved)) == fit()


def test_it_is_set_from_yaml(file, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"seed_everything: 0\ntrainer: {{max_epochs: 1, default_root_dir: {tmp_path}, logger: false}}\n"
        "model: {class_path: lightning_models.Recorder}\n"
        f"data: {{class_path: LazyH5DataModule, init_args: {{train_path: {file}, x_key: x, with_index: true,\n"
        "  shuffle: {scope: node}}}\n"
    )
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false"]
    main(["fit", "--config", str(config), *quiet, "--trainer.accelerator=cpu"])
    assert "train" in capsys.readouterr().out
    assert LazyH5DataModule(file, shuffle={"scope": "node"}).hparams.shuffle == {"scope": "node"}


# What is refused --------------------------------------------------------------------------------------------------

NODE = {"scope": "node"}
REFUSED = {
    "rows in memory": (lambda file: RankCachedH5DataModule(file, x_key="x", shuffle=NODE), "RankCachedH5DataModule"),
    "weights": (lambda file: LazyH5DataModule(file, x_key="x", weights="row", shuffle=NODE), "weights"),
    "a mixture": (lambda file: CombinedHDF5DataModule(mixture={"a": file, "b": file}, shuffle=NODE), "mixture"),
    "buckets": (
        lambda file: LazyH5DataModule(file, x_key="x", sample="segment", segments={"bucket": True}, shuffle=NODE),
        "segments.bucket",
    ),
    "storage order": (lambda file: ShuffleOptions(mode="none", scope="node"), "shuffle.mode='none'"),
    "a torch dataset": (lambda file: create_optimized_dataloader([(1,), (2,)], 1, shuffle=NODE), "a list"),
    "a shard": (
        lambda file: create_optimized_dataloader(RankMemCachedH5Dataset(file, "x"), 4, shuffle=NODE),
        "a RankMemCachedH5Dataset",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rows_of_a_node_is_refused(file, name):
    make, named = REFUSED[name]
    with pytest.raises(H5ValueError, match=rf"shuffle.scope='node' was given with {named}.*(Leave|Pass)"):
        make(file)


def test_another_scope_is_refused():
    with pytest.raises(H5ValueError, match=r"shuffle.scope='rank' was given. Pass 'global', 'node'"):
        ShuffleOptions(scope="rank")


@pytest.mark.parametrize("build", ["module", "loader"])
def test_nodes_with_different_numbers_of_ranks_are_refused(file, monkeypatch, build):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    builds = {
        "module": lambda: lazy(file, 0, 3).setup("fit"),
        "loader": lambda: create_optimized_dataloader(file, 4, rank=0, world_size=3, shuffle=NODE),
    }
    with pytest.raises(H5ValueError, match="3 replicas of the model on 2 nodes; each node needs the same number"):
        builds[build]()
