"""What loading costs: steps with batches that were read before, beside the others."""

import re

import numpy as np
import pytest
import torch
from arguments import nested
from hypothesis import given
from hypothesis import strategies as st
from lightning_models import Recorder, SaveAndStop, quiet_trainer

from lightning_h5 import H5StatsMonitor, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.callbacks import loader_cost
from lightning_h5.callbacks.loader_cost import LoaderCost, cost_remark
from lightning_h5.loading import HoldLimits, held_batches
from lightning_h5.loading.held_batches import HeldBatches

ROWS = 400  # 50 batches


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.repeat(np.arange(ROWS, dtype="f4"), 2).reshape(-1, 2), "y": np.arange(ROWS)})


@pytest.fixture(autouse=True)
def no_time_for_reading(monkeypatch):
    """Reading batches to hold takes no time, so that a busy machine holds as many as an idle one."""
    monkeypatch.setattr(held_batches, "perf_counter", lambda: 0.0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [0.0]
    monkeypatch.setattr(loader_cost, "perf_counter", lambda: now[0])
    return now


def module(file, kind=LazyH5DataModule, **options):
    return kind(file, file, **nested(x_key="x", y_key="y", batch_size=8, with_index=True, **options))


def run(file, monitor, *, model=None, kind=LazyH5DataModule, options=None, **trainer_options):
    model = model or Recorder()
    trainer = quiet_trainer(**{"max_epochs": 3, "callbacks": [monitor]} | trainer_options)
    trainer.fit(model, datamodule=module(file, kind, **(options or {})))
    return model


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("kind", [LazyH5DataModule, RankCachedH5DataModule])
@pytest.mark.parametrize("limit", [None, 41])
def test_batches_and_their_order_stay_the_same(file, kind, options, limit, capsys):
    trainer_options = {"kind": kind, "options": options} | ({} if limit is None else {"limit_train_batches": limit})
    measured = run(file, H5StatsMonitor(), **trainer_options)
    assert re.search(r"a step takes .* ms, and .* ms with batches that are in memory", capsys.readouterr().out)
    plain = run(file, H5StatsMonitor(measure_cost=False), **trainer_options)
    assert measured.train_rows == plain.train_rows
    assert "a step takes" not in capsys.readouterr().out


@pytest.mark.parametrize("step", [35, 40, 90])  # the first batch that is held, others, and some of another epoch
def test_a_run_stopped_while_batches_are_held_goes_on_with_the_next(file, tmp_path, step):
    whole = run(file, H5StatsMonitor(measure_cost=False))
    path = tmp_path / "stopped.ckpt"
    first = run(file, H5StatsMonitor(), callbacks=[H5StatsMonitor(), SaveAndStop(step, path)])
    rest = Recorder()
    quiet_trainer(max_epochs=3).fit(rest, datamodule=module(file), ckpt_path=path)
    assert {epoch: first.train_rows.get(epoch, []) + rest.train_rows.get(epoch, []) for epoch in range(3)} == (
        whole.train_rows
    )


def test_slow_transforms_show(file, clock, capsys):
    class Model(Recorder):
        def training_step(self, batch, batch_idx):
            clock[0] += 0.002
            return super().training_step(batch, batch_idx)

    def slow(x):  # of the batches of this process, which runs it when a batch is taken
        clock[0] += 0.001
        return x

    run(file, H5StatsMonitor(), model=Model(), options={"transform": slow})
    line = capsys.readouterr().out.replace("\n  ", " ")
    expected = r"a step takes 10 ms, and 2 ms with batches that are in memory \(\d+ steps\): loading costs 80.0% of it"
    assert re.search(expected, line)


def test_a_bad_batch_among_those_that_are_held_comes_at_its_place(file):
    def fails(x):
        if x[0] == 300:
            raise ValueError("no such luck")
        return x

    model = Recorder()
    with pytest.raises(ValueError, match="no such luck"):
        run(file, H5StatsMonitor(), model=model, options={"transform": fails, "shuffle": False})
    assert model.train_rows == {0: [*range(296)]}


def test_few_steps_are_not_judged(file, capsys):
    run(file, H5StatsMonitor(), limit_train_batches=12)
    assert "a step takes" not in capsys.readouterr().out


class FakeIteration:
    def __init__(self):
        self.n_held, self.limits, self.hold_seconds = 0, None, 0.0

    def hold(self, limits):
        self.limits = limits


class FakeLoader:
    def __init__(self, n=1):
        self.running = {FakeIteration() for _ in range(n)}


def steps(cost, loader, clock, seconds, n, n_held=0):
    (iteration,) = loader.running
    for at in range(n):
        clock[0] += seconds
        iteration.n_held = max(0, n_held - at - 1)
        cost.step([loader])


def test_steps_with_held_batches_are_compared_with_the_others(clock):
    cost, loader = LoaderCost(torch.device("cpu")), FakeLoader()
    steps(cost, loader, clock, 100.0, loader_cost.WARM_UP)
    (iteration,) = loader.running
    assert iteration.limits == HoldLimits()
    steps(cost, loader, clock, 50.0, 1, n_held=20)  # reads them
    steps(cost, loader, clock, 7.0, loader_cost.SETTLING - 1, n_held=19)
    steps(cost, loader, clock, 3.0, 16, n_held=16)
    steps(cost, loader, clock, 4.0, 11)
    cost.begin_epoch()
    clock[0] += 1000  # a checkpoint
    steps(cost, loader, clock, 4.0, 5)
    assert cost.amounts() == {"step_seconds": 4.0 * 14, "n_steps": 14, "held_seconds": 3.0 * 16, "n_held_steps": 16}
    assert "a step takes 4 ms, and 3 ms with batches that are in memory (16 steps): loading costs 25.0% of it" in (
        cost_remark({name: value / (1000 if "seconds" in name else 1) for name, value in cost.amounts().items()})
    )


def test_reading_held_batches_takes_a_two_hundredth_of_the_run_at_most(clock):
    cost, loader, waited, given = LoaderCost(torch.device("cpu")), FakeLoader(), 0.0, []
    (iteration,) = loader.running
    for _ in range(10):
        cost.begin_epoch()
        for _ in range(200):
            clock[0] += 0.1
            if iteration.limits is not None:  # batches take 50 ms each
                n = min(iteration.limits.n_batches, int(iteration.limits.seconds / 0.05) + 1)
                iteration.n_held, iteration.hold_seconds = n, 0.05 * n
                given.append(n)
                waited += iteration.hold_seconds
                clock[0] += iteration.hold_seconds
            iteration.limits, iteration.n_held = None, max(0, iteration.n_held - 1)
            cost.step([loader])
            assert waited <= 0.05 + 0.005 * clock[0] + 0.05  # up to a batch more than the limit
    assert max(given) >= loader_cost.SETTLING + loader_cost.LEAST_STEPS
    assert cost.amounts()["n_held_steps"] >= loader_cost.LEAST_STEPS


@pytest.mark.parametrize(("every", "n"), [(0, 20), (50, 20), (24, 12), (23, None), (1, None)])
def test_at_most_half_of_the_batches_between_two_logs_are_held(every, n, clock):
    cost, loader = LoaderCost(torch.device("cpu"), every), FakeLoader()
    steps(cost, loader, clock, 1.0, 60)
    (iteration,) = loader.running
    assert (None if iteration.limits is None else iteration.limits.n_batches) == n


def test_validation_among_held_batches_gives_no_figure(clock):
    cost, loader = LoaderCost(torch.device("cpu")), FakeLoader()
    steps(cost, loader, clock, 1.0, loader_cost.WARM_UP)
    steps(cost, loader, clock, 1.0, 8, n_held=20)
    cost.pause()
    steps(cost, loader, clock, 1.0, 30, n_held=12)
    assert cost.amounts()["n_held_steps"] == 0


def test_where_it_is_not_clear_whose_batches_come_none_are_held(clock):
    for loaders in ([FakeLoader(2)], [FakeLoader(), FakeLoader()]):
        cost = LoaderCost(torch.device("cpu"))
        for _ in range(60):
            cost.step(loaders)
        assert all(iteration.limits is None for loader in loaders for iteration in loader.running)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 40))
def test_held_batches_are_those_that_follow(n_batches, n_of_bytes, fails_at):
    source = iter(range(40))

    def read():
        number = next(source)
        if number == fails_at:
            raise ValueError(f"batch {number}")
        return {"x": torch.full((8,), float(number))}

    held = HeldBatches()
    held.read(read, HoldLimits(n_batches, n_of_bytes * 32, seconds=100))
    n = min(n_batches, n_of_bytes)
    assert len(held) == min(n, fails_at)
    for number in range(len(held)):
        assert held.take()["x"].tolist() == [number] * 8
    if fails_at < n:
        assert held
        with pytest.raises(ValueError, match=f"batch {fails_at}"):
            held.take()
    assert not held
