"""Random draws of transforms: others for each rank, worker, epoch and batch; the same in any layout."""

import random

import numpy as np
import pytest
import torch
from arguments import nested, nested_files
from draws import (
    draw_from_a_global_object,
    draw_from_global_streams,
    draw_of_the_batch,
    draw_of_the_row,
    draw_while_collating,
    own_of_each_kind,
    torch_draw_of_the_row,
)
from lightning.pytorch import seed_everything
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values

from lightning_h5 import H5LazyDataset, LazyH5DataModule
from lightning_h5.loading import H5DataLoader
from lightning_h5.order import OrderParameters, PlanSampler

ROWS, BATCH = 48, 4


TRANSFORMS = [draw_from_global_streams, draw_of_the_row, torch_draw_of_the_row]


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.arange(ROWS, dtype="f8"), "y": np.arange(ROWS, dtype="f8")})


@pytest.fixture
def draws(file):
    """``draws(transform, epochs, ...)``: for each epoch and row what was drawn for it, over all ranks of a loader."""

    def epochs_of_draws(epochs=(0,), seed=0, world_size=1, batch_size=BATCH, samples=False, loader=None, **dataset):
        dataset = H5LazyDataset(file, "x", **nested_files(with_index=True, **dataset))
        seen = {epoch: {} for epoch in epochs}
        for rank in range(world_size):
            sampler = PlanSampler(
                dataset.blocks(),
                OrderParameters(mode="global", seed=seed, batch_size=batch_size),
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                samples=samples,
            )
            batches = H5DataLoader(dataset, sampler=sampler, **(loader or {}))
            for epoch in epochs:
                sampler.set_epoch(epoch)
                for drawn, index in batches:
                    seen[epoch] |= {row: str(value.tolist()) for row, value in zip(index.tolist(), drawn, strict=True)}
        return seen

    return epochs_of_draws


LAYOUTS = {
    "no workers": {},
    "two workers": {"loader": {"num_workers": 2}},
    "persistent workers": {"loader": {"num_workers": 2, "persistent_workers": True}},
    "two ranks": {"world_size": 2},
    "three ranks with workers": {"world_size": 3, "loader": {"num_workers": 1}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_row_and_epoch_draws_its_own_and_the_same_in_any_layout(draws, transform, layout):
    """Under whatever state of the global streams: batches are the same for these layouts, so all draws are."""
    torch.manual_seed(1)
    right = draws(epochs=(0, 1), transform=transform)
    torch.manual_seed(2)
    assert draws(epochs=(0, 1), transform=transform, **LAYOUTS[layout]) == right
    drawn = [value for epoch in right.values() for value in epoch.values()]
    assert len(set(drawn)) == len(drawn) == 2 * ROWS
    assert draws(transform=transform, seed=1)[0] != right[0]


@pytest.mark.wide
def test_a_spawned_worker_draws_the_same(draws):
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert draws(transform=draw_of_the_row, loader=spawned) == draws(transform=draw_of_the_row)


@pytest.mark.parametrize("transform", [draw_of_the_row, torch_draw_of_the_row])
def test_a_generator_of_the_row_draws_the_same_whatever_the_batch_is(draws, transform):
    assert draws(transform=transform, batch_size=7, world_size=2) == draws(transform=transform)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_transform_and_a_collate_fn_draw_the_same_in_any_layout(draws, layout):
    for options in (
        {"batch_transform": draw_of_the_batch},
        {"samples": True, "loader": {"collate_fn": draw_while_collating}},
    ):
        right = draws(**options)
        assert len(set(right[0].values())) >= ROWS // BATCH
        both = options | LAYOUTS[layout] | {"loader": options.get("loader", {}) | LAYOUTS[layout].get("loader", {})}
        assert draws(**both) == right


def test_input_and_target_of_a_row_draw_the_same_so_that_a_crop_fits_its_mask(file):
    dataset = H5LazyDataset(file, "x", "y", transform=draw_of_the_row, target_transform=draw_of_the_row)
    for _ in range(2):
        x, y = dataset.read_batch(range(ROWS))
        assert torch.equal(x, y)
        assert len(set(x.tolist())) == ROWS


def test_without_a_plan_each_reading_draws_others(file):
    dataset = H5LazyDataset(file, "x", transform=draw_of_the_row)
    torch.manual_seed(0)
    first, second = dataset[3], dataset[3]
    torch.manual_seed(0)
    assert first != second
    assert dataset[3] == first


def test_the_global_streams_of_the_training_process_are_left_as_they_were(draws):
    """A model's dropout must not depend on what the transforms drew."""
    seed_everything(3)
    random.gauss(0, 1)
    np.random.normal()  # noqa: NPY002  # leaves half of a pair behind
    expected_after = []
    for between in (lambda: None, lambda: draws(transform=draw_from_global_streams)):
        seed_everything(3)
        random.gauss(0, 1)
        np.random.normal()  # noqa: NPY002
        between()
        expected_after.append((random.gauss(0, 1), np.random.normal(), torch.rand(3).tolist()))  # noqa: NPY002
    assert expected_after[0] == expected_after[1]


class Augmented(Recorder):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.drawn = [*getattr(self, "drawn", []), *map(str, batch[0].tolist())]
        return self.layer(torch.ones(1, 1)).sum()


def train(rank, file, world_size, workers, **options):
    seed_everything(4, workers=workers)
    model = Augmented()
    datamodule = LazyH5DataModule(
        file, **nested(x_key="x", batch_size=BATCH, with_index=True, transform=draw_from_global_streams, **options)
    )
    quiet_trainer(devices=world_size, strategy="ddp").fit(model, datamodule=datamodule)
    return model.drawn


def train_with(rank, file, world_size, workers, options):
    return train(rank, file, world_size, workers, **options)


@pytest.mark.wide
@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": False}])
def test_ranks_workers_and_epochs_draw_differently_after_seed_everything(file, tmp_path, workers, options):
    drawn = values(run_ranks(train_with, 2, tmp_path, file, 2, workers, options))
    everything = [value for rank in drawn for value in rank]
    assert len(everything) == 2 * ROWS
    assert len(set(everything)) == len(everything)
    assert sorted(everything) == sorted(values(run_ranks(train_with, 1, tmp_path, file, 1, workers, {}))[0])


OWN = np.random.default_rng(5)


def draw_from_ones_own(x, rng=OWN):
    return torch.tensor(float(rng is OWN))


def test_a_generator_of_ones_own_is_left_alone(file):
    assert H5LazyDataset(file, "x", transform=draw_from_ones_own)[0] == 1


class Module(torch.nn.Module):
    def forward(self, x, generator):
        return x + torch.rand((), generator=generator)


def test_a_torch_module_can_ask_too(file):
    dataset = H5LazyDataset(file, "x", transform=Module())
    assert 0 < dataset[0] < 1


def test_a_function_without_a_signature_asks_for_nothing(file):
    assert H5LazyDataset(file, "x", transform=float)[2] == 2.0


# Generators of transforms' own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", own_of_each_kind())
def test_a_generator_that_a_transform_owns_draws_by_row_in_any_layout(draws, kind):
    make = lambda: own_of_each_kind()[kind]  # noqa: E731
    alone = draws(transform=make(), epochs=(0, 1))
    assert len({value for rows in alone.values() for value in rows.values()}) == 2 * ROWS
    assert draws(transform=make(), epochs=(0, 1), loader={"num_workers": 2, "persistent_workers": True}) == alone
    assert draws(transform=make(), epochs=(0, 1), world_size=2, batch_size=3) == alone
    assert draws(transform=make(), epochs=(1,), seed=1)[1] != alone[1]


@pytest.mark.wide
def test_a_spawned_worker_seeds_the_object_that_its_function_uses(draws):
    alone = draws(transform=draw_from_a_global_object)
    assert (
        draws(transform=draw_from_a_global_object, loader={"num_workers": 2, "multiprocessing_context": "spawn"})
        == alone
    )


@pytest.mark.parametrize("kind", ["MONAI", "NumPy's Generator"])
def test_input_and_target_share_what_an_owned_generator_draws(file, kind):
    both = own_of_each_kind()[kind]
    dataset = H5LazyDataset(file, "x", "y", transform=both, target_transform=both)
    pairs = [dataset[row] for row in range(4)]
    assert all(x == y for x, y in pairs)
    assert len({float(x) for x, _ in pairs}) == 4


def test_a_batch_transform_may_own_a_generator(file):
    noise = own_of_each_kind()["MONAI"]
    dataset = H5LazyDataset(file, "x", batch_transform=lambda x: x * 0 + noise(x))
    assert len({float(dataset.read_batch([0])) for _ in range(4)}) == 4


def test_generators_of_samplers_and_modules_that_train_are_left_alone(file):
    generator = torch.Generator().manual_seed(3)
    expected = torch.Generator().manual_seed(3).get_state()
    loader = torch.utils.data.DataLoader(range(4), shuffle=True, generator=generator)
    model = Recorder()
    model.generator = generator
    dataset = H5LazyDataset(file, "x", transform=lambda x: x + len(loader) + len(model.rows))
    assert len(dataset.read_batch([0, 1])) == 2
    assert torch.equal(generator.get_state(), expected)
