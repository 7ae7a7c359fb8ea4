"""Blocks dealt to nodes: each node reads the same rows in every epoch, and nothing else of an epoch changes."""

import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5ResumeError, H5ValueError
from lightning_h5.order import (
    BlockTable,
    NodeOrder,
    NodeTurns,
    OrderParameters,
    PlanSampler,
    Position,
    Segment,
    TrainBatches,
    deal_blocks,
    epoch_order,
    label_entropy,
    launched_nodes,
)


class Layout(NamedTuple):
    """A file, and the nodes that train on it."""

    sizes: tuple[int, ...]
    nodes: int
    per_node: int
    batch_size: int
    mode: str = "global"
    drop_last: bool = False
    streams_of_a_node: int = 1
    seed: int = 0

    @property
    def world_size(self):
        return self.nodes * self.per_node

    @property
    def blocks(self):
        return BlockTable.of_sizes(self.sizes)

    @property
    def n_rows(self):
        return sum(self.sizes)

    @property
    def parameters(self):
        return OrderParameters(
            mode=self.mode,
            seed=self.seed,
            batch_size=self.batch_size,
            streams=self.nodes * self.streams_of_a_node,
            window=3,
            nodes=self.nodes,
            world_size=self.world_size,
        )

    @property
    def samplers(self):
        return [self.sampler(rank) for rank in range(self.world_size)]

    def sampler(self, rank=0):
        return PlanSampler(
            self.blocks,
            self.parameters,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            rank=rank,
            world_size=self.world_size,
        )

    def order(self, epoch):
        return epoch_order(self.blocks, self.parameters, epoch, drop_last=self.drop_last)

    def rows_of_nodes(self):
        order = NodeOrder(self.blocks, self.parameters, 0, drop_last=self.drop_last)
        sizes = [NodeTurns(self.batches(), self.nodes).size(node) for node in range(self.nodes)]
        return [
            order.rows_of(node).rows(np.arange(n)).tolist() if n else []
            for node, n in zip(range(99), sizes, strict=False)
        ]

    def batches(self, epoch=0):
        return TrainBatches(self.n_rows, self.batch_size, self.world_size, self.drop_last, epoch)


layouts = st.builds(
    Layout,
    st.lists(st.integers(1, 9), min_size=1, max_size=25).map(tuple),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from(["global", "chunks"]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 9),
)


def epoch_of(samplers, epoch, position=None):
    """Rows of each step of each rank, after looking that all take the same number of steps."""
    for one in samplers:
        one.set_epoch(epoch)
        one.restore(position)
    steps = [[token.rows.tolist() for token in one] for one in samplers]
    assert len({len(rows) for rows in steps}) == 1
    assert all(len(one) >= len(rows) for one, rows in zip(samplers, steps, strict=True))
    return steps


def in_order(steps):
    return [row for of_ranks in zip(*steps, strict=True) for rows in of_ranks for row in rows]


# An epoch ---------------------------------------------------------------------------------------------------------


@given(layouts, st.integers(0, 4))
def test_each_row_comes_once_over_all_ranks_with_equal_steps(layout, epoch):
    rows = in_order(epoch_of(layout.samplers, epoch))
    assert len(rows) == len(set(rows)) == layout.n_rows - layout.batches().n_left_out
    assert sorted(layout.order(epoch)(0, layout.n_rows).tolist()) == list(range(layout.n_rows))


@given(layouts, st.integers(0, 4))
def test_as_many_rows_are_left_out_as_in_the_global_scope(layout, epoch):
    everywhere = replace(layout.parameters, nodes=0, world_size=0)
    one = PlanSampler(
        layout.blocks,
        everywhere,
        batch_size=layout.batch_size,
        drop_last=layout.drop_last,
        rank=0,
        world_size=layout.world_size,
    )
    ours, theirs = layout.sampler().plan(epoch), one.plan(epoch)
    assert [ours.bounds(step) for step in range(ours.n_steps)] == [
        theirs.bounds(step) for step in range(theirs.n_steps)
    ]


@given(layouts)
def test_each_node_has_the_same_rows_in_every_epoch(layout):
    held = layout.rows_of_nodes()
    assert sorted(row for rows in held for row in rows) == list(range(layout.n_rows))
    for epoch in range(3):
        for rank, steps in enumerate(epoch_of(layout.samplers, epoch)):
            node = rank // layout.per_node
            assert {row for rows in steps for row in rows} <= set(held[node])
        whole = [[] for _ in range(layout.nodes)]
        rows = layout.order(epoch)(0, layout.n_rows).tolist()
        position = 0
        for turn in NodeTurns(layout.batches(epoch), layout.nodes).turns(0, layout.n_rows):
            n_rows = turn.stop - turn.start
            whole[turn.node] += rows[position : position + n_rows]
            position += n_rows
        assert [sorted(of_node) for of_node in whole] == [sorted(rows) for rows in held]


@given(layouts)
def test_nodes_have_whole_blocks_but_one_at_each_border(layout):
    starts, held = layout.blocks.starts, layout.rows_of_nodes()
    nodes_of_block = [
        sum(bool({*range(low, high)} & {*rows}) for rows in held) for low, high in pairwise(starts.tolist())
    ]
    assert sum(n - 1 for n in nodes_of_block) <= layout.nodes - 1


@given(layouts)
def test_nodes_have_about_the_same_number_of_rows(layout):
    sizes = [len(rows) for rows in layout.rows_of_nodes()]
    assert max(sizes) - min(sizes) <= 2 * layout.per_node + 1


@pytest.mark.parametrize("mode", ["global", "chunks"])
def test_each_epoch_and_each_seed_has_another_order_within_a_node(mode):
    layout = Layout((8,) * 40, nodes=2, per_node=2, batch_size=8, mode=mode)
    orders = [epoch_of(layout._replace(seed=seed).samplers, epoch) for seed in (0, 1) for epoch in range(4)]
    for rank in range(4):
        assert len({str(steps[rank]) for steps in orders}) == 8
    assert {*layout.rows_of_nodes()[0]} != {*layout._replace(seed=1).rows_of_nodes()[0]}


@pytest.mark.parametrize("mode", ["global", "chunks"])
def test_nodes_are_not_in_step_with_each_other(mode):
    """With one seed for all nodes the same blocks of two nodes would meet in each epoch."""
    layout = Layout((4,) * 20, nodes=2, per_node=1, batch_size=4, mode=mode)
    places = []
    for node, held in enumerate(layout.rows_of_nodes()):
        order = [row for rows in epoch_of(layout.samplers, 0)[node] for row in rows]
        places.append([held.index(row) for row in order])
    assert places[0] != places[1]


@pytest.mark.parametrize("mode", ["global", "chunks"])
@pytest.mark.parametrize(("batch_size", "drop_last"), [(1, False), (4, True)])
def test_a_row_that_is_left_out_of_one_epoch_is_in_others(mode, batch_size, drop_last):
    layout = Layout((5,) * 9, 3, 2, batch_size, mode, drop_last)
    assert layout.batches().n_left_out
    seen = {row for epoch in range(60) for row in in_order(epoch_of(layout.samplers, epoch))}
    assert seen == {*range(layout.n_rows)}


def test_the_order_of_an_epoch_never_changes():
    """Saved runs rely on it; another order is another version of the plan."""
    layout = Layout((3, 2, 4, 3), nodes=2, per_node=1, batch_size=5, seed=9)
    assert layout.rows_of_nodes() == [[5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 11]]
    assert in_order(epoch_of(layout.samplers, 2)) == [6, 8, 9, 4, 2, 3, 7, 5, 10, 1, 11, 0]
    window = layout._replace(mode="chunks", batch_size=2)
    assert in_order(epoch_of(window.samplers, 2)) == [8, 9, 1, 3, 7, 6, 4, 2, 5, 10, 0, 11]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=25), st.sampled_from(["global", "chunks"]), st.integers(0, 3))
def test_on_one_node_the_order_is_that_of_the_global_scope(sizes, mode, epoch):
    blocks = BlockTable.of_sizes(sizes)
    one, everywhere = (
        epoch_order(
            blocks,
            OrderParameters(mode=mode, batch_size=3, streams=2, window=3, nodes=nodes, world_size=2 * nodes),
            epoch,
            drop_last=False,
        )
        for nodes in (1, 0)
    )
    assert one(0, blocks.n_rows).tolist() == everywhere(0, blocks.n_rows).tolist()


@given(layouts, st.integers(0, 4), st.data())
def test_any_stretch_is_reached_without_what_comes_before_it(layout, epoch, data):
    whole = layout.order(epoch)(0, layout.n_rows).tolist()
    order = layout.order(epoch)
    for _ in range(3):
        start = data.draw(st.integers(0, layout.n_rows))
        stop = data.draw(st.integers(start, layout.n_rows))
        assert order(start, stop).tolist() == whole[start:stop]


def test_each_rank_has_streams_of_its_own_within_its_node():
    """Two ranks of a node share no block but at borders, as in the order of all rows."""
    layout = Layout((8,) * 64, nodes=2, per_node=2, batch_size=8, mode="chunks", streams_of_a_node=2)
    n_rounds = layout.sampler().plan(0).n_steps - 2  # without the end, which is shuffled together
    blocks = [{row // 8 for rows in steps[:n_rounds] for row in rows} for steps in epoch_of(layout.samplers, 0)]
    for first in range(4):
        for second in range(first):
            assert len(blocks[first] & blocks[second]) <= 2


def test_neighbors_are_dealt_together_if_there_are_very_many_blocks(monkeypatch):
    monkeypatch.setattr("lightning_h5.order.nodes.MAX_DEALT", 10)
    layout = Layout((2,) * 95, nodes=3, per_node=1, batch_size=4)
    held = layout.rows_of_nodes()
    assert sorted(row for rows in held for row in rows) == list(range(190))
    runs = sum(b - a > 1 for rows in held for a, b in pairwise(rows)) + 3
    assert runs <= 10 + 2
    for mode in ("global", "chunks"):
        assert sorted(in_order(epoch_of(layout._replace(mode=mode).samplers, 1))) == list(range(190))


@pytest.mark.parametrize("mode", ["global", "chunks"])
def test_a_hundred_million_rows_take_little_memory(mode):
    blocks = BlockTable.of_sizes(np.full(10**6, 100))
    parameters = OrderParameters(mode=mode, batch_size=64, streams=8, window=50, nodes=8, world_size=8)
    one = PlanSampler(blocks, parameters, batch_size=64, rank=5, world_size=8)
    tracemalloc.start()
    plan = one.plan(3)
    rows = plan.rows(10**5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({*rows.tolist()}) == 64
    assert peak < 150 << 20
    order = NodeOrder(blocks, parameters, 0, drop_last=False)
    assert np.isin(rows // 100, order.rows_of(5).firsts // 100).all()


# A resume ---------------------------------------------------------------------------------------------------------


@given(layouts, st.integers(0, 3), st.data())
def test_a_resumed_epoch_equals_the_unbroken_one(layout, epoch, data):
    whole = epoch_of(layout.samplers, epoch)
    n_steps = data.draw(st.integers(0, len(whole[0])))
    segments = (Segment(layout.batch_size, layout.world_size, n_steps * layout.world_size),) if n_steps else ()
    position = Position(epoch, segments, layout.sampler().present_order())
    assert epoch_of(layout.samplers, epoch, position) == [steps[n_steps:] for steps in whole]


@given(
    layouts, st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 6), st.integers(0, 5)), max_size=3)
)
def test_on_other_nodes_the_rest_of_an_epoch_is_each_remaining_row_once(layout, others):
    """Whatever number of nodes, ranks and rows of a batch each start has; the next epoch is theirs."""
    layout = layout._replace(drop_last=False)
    whole = layout.order(1)(0, layout.n_rows).tolist()
    seen, segments, now = [], (), layout
    for nodes, per_node, batch_size, n_steps in [(layout.nodes, layout.per_node, layout.batch_size, 2), *others]:
        now = layout._replace(nodes=nodes, per_node=per_node, batch_size=batch_size)
        position = Position(1, segments, layout.sampler().present_order())
        steps = [rows[:n_steps] for rows in epoch_of(now.samplers, 1, position)]
        if layout.batch_size > 1:
            seen += in_order(steps)
            assert seen == whole[: len(seen)]
        if steps[0]:
            segments = (*segments, Segment(batch_size, now.world_size, len(steps[0]) * now.world_size))
        assert now.sampler().sequence(1, position.order).n_consumed(segments, drop_last=False) >= len(seen)
    rest = in_order(epoch_of(now.samplers, 1, Position(1, segments, layout.sampler().present_order())))
    if layout.batch_size > 1 and layout.n_rows - len(seen) >= now.world_size:
        assert seen + rest == whole
    after = epoch_of(now.samplers, 2)
    held = now.rows_of_nodes() if now.nodes > 1 else [range(layout.n_rows)]
    for rank, steps in enumerate(after):
        assert {row for rows in steps for row in rows} <= {*held[rank // now.per_node]}


def test_a_saved_position_is_plain_and_small_and_names_the_nodes():
    layout = Layout((8,) * 200, nodes=2, per_node=2, batch_size=4)
    sampler = layout.sampler()
    state = Position(3, (Segment(4, 4, 40),), sampler.present_order()).state(sampler)
    text = json.dumps(state)
    assert len(text) < 1000
    assert (state["order"]["nodes"], state["order"]["world_size"]) == (2, 4)
    restored = Position.from_state(json.loads(text), sampler)
    assert restored.order == sampler.present_order()


def test_a_saved_position_of_the_global_scope_is_what_it_was():
    sampler = PlanSampler(BlockTable.of_sizes([8] * 5), OrderParameters(mode="global", seed=3), batch_size=4)
    state = Position(1, (Segment(4, 1, 2),), sampler.present_order()).state(sampler, {"sampled": "files"})
    assert state == {
        "version": 2,
        "epoch": 1,
        "segments": [[4, 1, 2]],
        "finished": False,
        "order": {"mode": "global", "seed": 3, "batch_size": 4, "streams": 1, "window": 0, "version": 1},
        "drop_last": False,
        "shards": None,
        "n_rows": 40,
        "n_blocks": 5,
        "identity": {"sampled": "files"},
        "digest": "de7b917b957569c7",
    }
    assert Position.from_state(state, sampler, {"sampled": "files"}).order == sampler.present_order()


@pytest.mark.parametrize("saved_nodes", [0, 2])
def test_a_position_of_the_other_scope_is_refused(saved_nodes):
    blocks = BlockTable.of_sizes([8] * 5)
    samplers = [
        PlanSampler(blocks, OrderParameters(mode="global", nodes=nodes), batch_size=4, rank=0, world_size=2)
        for nodes in (saved_nodes, 2 - saved_nodes)
    ]
    state = Position(0, (Segment(4, 2, 2),), samplers[0].present_order()).state(samplers[0])
    names = ("node", "global") if saved_nodes else ("global", "node")
    with pytest.raises(H5ResumeError, match=f"shuffle.scope: saved '{names[0]}', present '{names[1]}'"):
        Position.from_state(state, samplers[1])


def test_a_position_says_if_the_number_of_nodes_changed():
    two, three = (Layout((8,) * 50, nodes, 1, 4).sampler() for nodes in (2, 3))
    position = Position(4, (), two.present_order())
    assert position.change_of_nodes(two) == ""
    assert "was 2 and is 3: from epoch 5 on" in position.change_of_nodes(three)


# What is refused, and what is reported ----------------------------------------------------------------------------


def test_ranks_that_are_no_multiple_of_the_nodes_are_refused():
    blocks = BlockTable.of_sizes([8] * 5)
    sampler = PlanSampler(blocks, OrderParameters(mode="global", nodes=2), batch_size=4, rank=0, world_size=3)
    with pytest.raises(H5ValueError, match="3 replicas of the model on 2 nodes"):
        len(sampler)


def test_streams_that_are_no_multiple_of_the_nodes_are_refused():
    parameters = OrderParameters(mode="chunks", window=2, streams=3, nodes=2, world_size=2)
    with pytest.raises(H5ValueError, match="3 streams were requested for 2 nodes"):
        epoch_order(BlockTable.of_sizes([8] * 5), parameters, 0, drop_last=False)


ENVIRONMENTS = {
    "nothing": ({}, 4, 1),
    "torchrun": ({"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "12"}, 12, 3),
    "another launcher": ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 8, 2),
    "replicas of two ranks": ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 4, 2),
    "the ranks of a node alone": ({"LOCAL_WORLD_SIZE": "2"}, 6, 3),
    "Open MPI": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 4, 2),
    "fewer ranks than a node has": ({"LOCAL_WORLD_SIZE": "8"}, 1, 1),
    "no number": ({"LOCAL_WORLD_SIZE": "x"}, 4, 1),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_without_a_trainer_the_environment_names_the_nodes(monkeypatch, name):
    environment, n_replicas, expected = ENVIRONMENTS[name]
    for variable in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert launched_nodes(n_replicas) == expected


def test_nodes_with_different_numbers_of_ranks_are_refused(monkeypatch):
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(H5ValueError, match="4 ranks on this node and 6 in all"):
        launched_nodes(6)


def entropy(nodes, n_blocks, rows_per_block=32, mode="global", seed=0):
    blocks = BlockTable.of_sizes([rows_per_block] * n_blocks)
    parameters = OrderParameters(
        mode=mode, seed=seed, batch_size=64, streams=max(1, nodes), window=64, nodes=nodes, world_size=max(1, nodes)
    )
    return label_entropy(blocks, parameters, max(1, nodes), drop_last=False)


@pytest.mark.parametrize("mode", ["global", "chunks"])
def test_many_blocks_for_each_node_mix_as_well_as_all_rows(mode):
    assert entropy(0, 640) == pytest.approx(2.23, abs=0.03)
    assert entropy(4, 640, mode=mode) == pytest.approx(entropy(0, 640), abs=0.1)


def test_the_figures_of_the_page_on_nodes():
    found = [[entropy(nodes, 625, seed=seed) for seed in range(5)] for nodes in (0, 8, 32)]
    assert [f"{np.mean(each):.2f}" for each in found] == ["2.23", "2.18", "2.00"]


def test_few_blocks_for_each_node_mix_fewer_labels():
    assert entropy(4, 640) > entropy(64, 640) > entropy(64, 64) + 0.5


@given(layouts, st.data())
def test_blocks_are_dealt_in_one_order_whatever_places_nodes_have(layout, data):
    blocks, dealt = layout.blocks, deal_blocks(layout.blocks, 7)
    cuts = sorted(data.draw(st.sets(st.integers(1, layout.n_rows), max_size=4)) | {0, layout.n_rows})
    parts = [dealt.rows(low, high) for low, high in pairwise(cuts)]
    rows = [row for part in parts for row in part.rows(np.arange(part.begins[-1])).tolist()]
    assert sorted(rows) == list(range(layout.n_rows))
    assert [part.blocks(blocks).n_rows for part in parts] == np.diff(cuts).tolist()
