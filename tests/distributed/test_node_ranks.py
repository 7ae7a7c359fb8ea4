"""``shuffle.scope="node"`` on two nodes under the Trainer, stopped and resumed, also on other nodes."""

import os

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from arguments import nested
from lightning_models import Recorder, SaveOnException, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import LazyH5DataModule

ROWS, PER_CHUNK = 163, 4


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as h5:
        x = np.repeat(np.arange(ROWS)[:, None], 8, axis=1)
        h5.create_dataset("x", data=x, chunks=(PER_CHUNK, 8), compression="gzip")
    return str(path)


def train(rank, file, folder, nodes, world_size, options):
    """Trains on nodes of this machine; returns this rank's rows of each epoch, and what it logged."""
    per_node = world_size // nodes
    node = options.get("node_rank", {}).get(rank, rank // per_node)
    os.environ |= {"NODE_RANK": str(node), "LOCAL_RANK": str(rank % per_node)}
    if world_size == 1:
        del os.environ["LOCAL_RANK"]
    model = Recorder(fail_at=options.get("fail_at"))
    datamodule = LazyH5DataModule(
        file, x_key="x", with_index=True, batch_size=4, shuffle={"scope": "node"} | options.get("shuffle", {}),
        num_workers=options.get("num_workers", 0),
    )  # fmt: skip
    strategy = "ddp" if world_size > 1 else "auto"
    trainer = quiet_trainer(
        devices=per_node, num_nodes=nodes, strategy=strategy, max_epochs=3, callbacks=[SaveOnException(folder)]
    )
    try:
        trainer.fit(model, datamodule=datamodule, ckpt_path=options.get("ckpt_path"))
    except RuntimeError as error:
        if "stop here" not in str(error):
            raise
    saved = torch.load(folder / "exception.ckpt", weights_only=True) if options.get("fail_at") else {}
    return model.train_rows, saved.get("LazyH5DataModule")


def run(file, folder, nodes, world_size, **options):
    folder.mkdir(exist_ok=True)
    return run_ranks(train, world_size, folder, file, folder, nodes, world_size, options)


def rows_of(outcomes):
    return [rows for rows, _ in values(outcomes)]


def check_epochs(ranks, nodes, epochs=range(3)):
    per_node = len(ranks) // nodes
    for node in range(nodes):
        of_node = ranks[node * per_node : (node + 1) * per_node]
        found = [[row for rows in of_node for row in rows[epoch]] for epoch in epochs]
        assert all(sorted(rows) == sorted(found[0]) for rows in found)
        assert len({str(rows) for rows in found}) == len(found)
    for epoch in epochs:
        assert sorted(row for rows in ranks for row in rows[epoch]) == list(range(ROWS))


@pytest.mark.wide
@pytest.mark.parametrize(("nodes", "world_size"), [(2, 2), (2, 4)])
def test_each_node_trains_on_the_same_rows_in_every_epoch(file, tmp_path, nodes, world_size):
    check_epochs(rows_of(run(file, tmp_path / "run", nodes, world_size)), nodes)


@pytest.mark.wide
@pytest.mark.parametrize(("num_workers", "mode"), [pytest.param(0, "auto", marks=pytest.mark.wide), (2, "chunks")])
def test_a_run_on_two_nodes_goes_on_exactly_where_it_was_broken_off(file, tmp_path, num_workers, mode):
    options = {"num_workers": num_workers, "shuffle": {"mode": mode, "buffer": 10 * PER_CHUNK * 64}}
    whole = rows_of(run(file, tmp_path / "whole", 2, 2, **options))
    broken = values(run(file, tmp_path / "run", 2, 2, fail_at=(1, 7), **options))
    saved = tmp_path / "run" / "exception.ckpt"
    state = broken[0][1]
    assert (state["order"]["nodes"], state["order"]["world_size"]) == (2, 2)
    assert len(str(state)) < 4096
    resumed = rows_of(run(file, tmp_path / "resumed", 2, 2, ckpt_path=str(saved), **options))
    for rank in range(2):
        before, after = broken[rank][0], resumed[rank]
        assert {epoch: before.get(epoch, []) + after.get(epoch, []) for epoch in range(3)} == whole[rank]


@pytest.mark.wide
@pytest.mark.parametrize(("nodes", "world_size"), [(1, 1), (1, 2), (3, 3)])
def test_on_other_nodes_the_rest_of_the_epoch_is_each_row_once_and_the_next_epoch_is_theirs(
    file, tmp_path, nodes, world_size
):
    broken = rows_of(run(file, tmp_path / "run", 2, 2, fail_at=(1, 7)))
    saved = tmp_path / "run" / "exception.ckpt"
    outcomes = run(file, tmp_path / "resumed", nodes, world_size, ckpt_path=str(saved))
    resumed = rows_of(outcomes)
    rest = [row for rows in [*broken, *resumed] for row in rows[1]]
    assert sorted(rest) == list(range(ROWS))
    assert f"the number of nodes was 2 and is {nodes}: from epoch 2 on" in outcomes[0].output
    check_epochs(resumed, nodes, [2])
    fresh = rows_of(run(file, tmp_path / "fresh", nodes, world_size))
    assert [rows[2] for rows in resumed] == [rows[2] for rows in fresh]


@pytest.mark.wide
def test_ranks_that_are_not_numbered_node_by_node_are_refused(file, tmp_path):
    outcomes = run_ranks(misnumbered, 2, tmp_path, file)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert all("rank 1 of 2 on 2 nodes is on node 0 instead of 1" in outcome.error for outcome in outcomes)


def misnumbered(rank, file):
    datamodule = LazyH5DataModule(file, x_key="x", with_index=True, shuffle={"scope": "node"})
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    trainer = quiet_trainer(devices=1, num_nodes=2, strategy="ddp")
    type(trainer).node_rank = property(lambda trainer: 0)  # as a cyclic distribution of tasks would have it
    trainer.fit(Recorder(), datamodule=datamodule)


def disagreeing(rank, file):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(rank + 1)}
    dist.init_process_group("gloo")
    datamodule = LazyH5DataModule(file, **nested(x_key="x", batch_size=4), shuffle={"scope": "node"})
    datamodule.setup("fit")


@pytest.mark.wide
def test_ranks_that_count_other_nodes_stop_together(file, tmp_path):
    outcomes = run_ranks(disagreeing, 2, tmp_path, file)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    assert all("nodes: rank 0 has 2, rank 1 has 1" in outcome.error for outcome in outcomes)
