"""The history of a run: the batches of any step, by arithmetic; what is saved of it; and what it refuses."""

import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5ResumeError, H5ValueError
from lightning_h5.order import (
    BlockTable,
    EachRowOnce,
    OrderParameters,
    PlanSampler,
    Position,
    RunHistory,
    Stretch,
    batches_of_step,
    check_run,
    run_settings,
)

ROWS, IDENTITY = 103, {"sampled": "a" * 32, "whole": "b" * 32}


def sampler_of(rank=0, world_size=1, batch_size=4, **parameters):
    blocks = BlockTable.of_sizes([7] * 14 + [5])
    order = OrderParameters(**{"mode": "global", "seed": 3} | parameters)
    return PlanSampler(blocks, order, batch_size=batch_size, rank=rank, world_size=world_size)


def stretch_of(sampler, **numbers):
    settings = run_settings(sampler, 0, sampler.present_order(), IDENTITY)
    values = {"epoch": 0, "batch": 0, "step": 0, "n_batches": len(sampler), "accumulated": 1, "is_fresh": True}
    values |= {"batch_size": sampler.batch_size, "world_size": sampler.num_replicas, "consumed": None}
    return Stretch(**values | {"settings": settings} | numbers)


def counted(stretch, n_epochs):
    """The batches of each step, counted batch by batch as Lightning does."""
    steps, window = {}, []
    step = stretch.step
    for epoch in range(stretch.epoch, stretch.epoch + n_epochs):
        for batch in range(stretch.batch if epoch == stretch.epoch else 0, stretch.n_batches):
            window.append((epoch, batch))
            if (batch + 1) % stretch.accumulated == 0 or batch + 1 == stretch.n_batches:
                steps[step], window, step = window, [], step + 1
    return steps


@given(st.data())
def test_batches_of_a_step_are_those_that_lightning_counts(data):
    n_batches = data.draw(st.integers(1, 12))
    stretch = stretch_of(
        sampler_of(),
        epoch=data.draw(st.integers(0, 3)),
        batch=data.draw(st.integers(0, n_batches - 1)),
        step=data.draw(st.integers(0, 50)),
        n_batches=n_batches,
        accumulated=data.draw(st.integers(1, 5)),
    )
    for step, batches in counted(stretch, 4).items():
        epoch, first, stop = stretch.batches_of(step)
        assert [(epoch, batch) for batch in range(first, stop)] == batches
        assert stretch.step_before(*batches[0]) == step


@pytest.mark.parametrize("nodes", [0, 2])
@pytest.mark.parametrize("mode", ["global", "chunks", "none"])
def test_rows_of_a_step_are_those_of_the_samplers_tokens(mode, nodes):
    """Also of an epoch that other ranks began, and of blocks that were dealt to nodes."""
    if nodes and mode == "none":
        pytest.skip("nothing is dealt")
    options = {"mode": mode, "nodes": nodes, "streams": 2, "window": 3}
    began = sampler_of(world_size=4, batch_size=3, **options)
    position = Position(1, (), began.present_order()).after(began, 4)
    samplers = [sampler_of(rank, 2, 5, **options) for rank in range(2)]
    for sampler in samplers:
        sampler.restore(position)
    settings = run_settings(samplers[0], position.epoch, position.order, IDENTITY)
    n_before = len(samplers[0]) - samplers[0].plan(1).n_steps
    stretch = stretch_of(
        samplers[0], epoch=1, batch=n_before, step=20, settings=settings, consumed=position.consumed(samplers[0])
    )
    recipe = EachRowOnce(samplers[0].blocks)
    for rank, sampler in enumerate(samplers):
        for step, token in enumerate(sampler.tokens(1), start=20):
            (batch,) = batches_of_step(stretch, step, lambda _: recipe, [rank])
            assert batch.rows.tolist() == token.rows.tolist()
            assert (batch.rank, batch.epoch, batch.batch, batch.position) == (rank, 1, token.step, token.position)


def resumed(n, recipe=""):
    """The history of a run that was resumed so often in the middle of epochs."""
    history, sampler = RunHistory(), sampler_of()
    settings = run_settings(sampler, 0, sampler.present_order(), IDENTITY)
    if recipe:
        settings = {**settings, "order": {**settings["order"], "recipe": recipe}}
    for number in range(n):
        stretch = stretch_of(
            sampler, epoch=number, batch=5, step=100_000 * number, settings=settings, consumed=sampler_consumed(sampler)
        )
        history = history.followed_by(stretch)
    return history


def sampler_consumed(sampler):
    return Position(0, (), sampler.present_order()).after(sampler, 5).consumed(sampler)


def test_a_saved_history_is_the_same_one():
    history = resumed(5)
    assert RunHistory.from_state(json.loads(json.dumps(history.state()))) == history
    assert RunHistory.from_state(None) == RunHistory()


def test_a_resume_takes_few_bytes_and_the_oldest_go_first():
    sizes = [len(json.dumps(resumed(n).state(), separators=(",", ":"))) for n in (1, 2, 11)]
    assert sizes[1] - sizes[0] < 30
    assert sizes[2] - sizes[1] < 270
    many = RunHistory.from_state(resumed(500).state())
    assert len(pickle.dumps(many.state())) < 3072
    assert 100 < len(many.stretches) < 500
    assert many.stretches[-1].epoch == 499
    with pytest.raises(H5ValueError, match="the history in the checkpoint begins with step"):
        many.stretch_of(0)


def test_what_was_undone_is_dropped():
    history, stretch = resumed(5), stretch_of(sampler_of(), step=250_000)
    assert [each.step for each in history.followed_by(stretch).stretches] == [0, 100_000, 200_000, 250_000]


def test_a_damaged_history_is_refused():
    state = resumed(2).state()
    state["stretches"][0][2] += 1
    with pytest.raises(H5ResumeError, match="is damaged"):
        RunHistory.from_state(state)


def test_steps_that_are_not_determined_are_errors():
    with pytest.raises(H5ValueError, match="nothing is known of the run"):
        RunHistory().stretch_of(0)
    history = RunHistory((stretch_of(sampler_of(), settings={"unknown": "manual"}), stretch_of(sampler_of(), step=7)))
    with pytest.raises(H5ValueError, match="the model steps its optimizers itself"):
        history.stretch_of(6)
    assert history.stretch_of(7).step == 7
    with pytest.raises(H5ValueError, match="changed while its gradients were accumulated"):
        stretch_of(sampler_of(), batch=1, accumulated=2, is_fresh=False).batches_of(0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rows", {"n_rows": 5}),
        ("seed", {"seed": 4}),
        ("files", {"identity": {"sampled": "c" * 32}}),
        ("files (whole)", {"identity": {"whole": "c" * 32}}),
    ],
)
def test_other_data_is_refused(name, changes):
    sampler = sampler_of()
    present = {"seed": 3, "n_rows": ROWS, "recipe": EachRowOnce(sampler.blocks), "identity": IDENTITY}
    check_run(stretch_of(sampler), **present)
    with pytest.raises(H5ResumeError, match=rf"\n  {re.escape(name)}: trained .*, present "):
        check_run(stretch_of(sampler), **present | changes)


def test_a_long_recipe_is_saved_as_a_digest():
    sampler = sampler_of(recipe="rows of " + "x" * 5000)
    order = sampler.parameters
    assert len(json.dumps(run_settings(sampler, 0, order, IDENTITY))) < 500
