"""``device_transform``: on each batch after the copy to the device, by stage, with draws that a resumed run repeats."""

import random
import re
import warnings
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.__main__ import main
from lightning_h5.datamodules import device_transform

N_ROWS, BATCH = 40, 4
MODULES = (LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule)
HOOK = "on_after_batch_transfer"


@pytest.fixture
def path(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.repeat(np.arange(N_ROWS, dtype="f4")[:, None], 3, axis=1)
        file["y"] = np.arange(N_ROWS)
    return str(tmp_path / "rows.h5")


class Seen(Recorder):
    """Remembers what batches look like when a step gets them."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.batches = {"train": [], "val": [], "test": [], "predict": []}
        self.drawn = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.batches["train"].append(batch)
        self.drawn.setdefault(self.current_epoch, []).append(values_of(batch))
        return loss

    def validation_step(self, batch, batch_idx):
        self.batches["val"].append(batch)

    def test_step(self, batch, batch_idx):
        self.batches["test"].append(batch)

    def predict_step(self, batch, batch_idx):
        self.batches["predict"].append(batch)
        return torch.zeros(1)


def x_of(batch):
    return batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple | list) else batch


def values_of(batch):
    return x_of(batch).flatten().tolist()


def with_x(batch, change):
    """The batch with another input, whatever its form."""
    if isinstance(batch, dict):
        return batch | {"x": change(batch["x"])}
    return type(batch)([change(batch[0]), *batch[1:]]) if isinstance(batch, tuple | list) else change(batch)


def add_hundred(batch):
    return with_x(batch, lambda x: x + 100)


def fitted(datamodule, model=None, **options):
    model = model or Seen()
    quiet_trainer(**{"max_epochs": 1, "num_sanity_val_steps": 0} | options).fit(model, datamodule=datamodule)
    return model


FORMS = {"dict": {"fields": ["x", "y"]}, "tuple": {"x_key": "x", "y_key": "y"}}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_all_stages_are_transformed(path, kind, form):
    datamodule = kind(
        path, path, path, path, device_transform=add_hundred, with_index=True, batch_size=BATCH, **FORMS[form]
    )
    model = fitted(datamodule)
    trainer = quiet_trainer()
    trainer.test(model, datamodule=datamodule, verbose=False)
    trainer.predict(model, datamodule=datamodule)
    for batches in model.batches.values():
        assert sorted(value for batch in batches for value in x_of(batch)[:, 0].tolist()) == list(range(100, 140))


def test_a_batch_that_is_a_tensor(path):
    datamodule = LazyH5DataModule(path, x_key="x", batch_size=BATCH, device_transform=add_hundred)

    class Alone(Seen):
        def training_step(self, batch, batch_idx):
            self.batches["train"].append(batch)
            return self.layer(batch[:, :1]).sum()

    model = fitted(datamodule, Alone())
    assert sorted(torch.cat(model.batches["train"])[:, 0].tolist()) == list(range(100, 140))


@pytest.mark.parametrize(
    ("stages", "changed"),
    [
        ({"train": add_hundred}, {"train"}),
        ({"eval": add_hundred}, {"val", "test", "predict"}),
        ({"train": None, "eval": add_hundred}, {"val", "test", "predict"}),
        ({}, set()),
    ],
)
def test_a_mapping_separates_training_from_evaluation(path, stages, changed):
    datamodule = LazyH5DataModule(
        path, path, path, path, x_key="x", y_key="y", with_index=True, batch_size=BATCH, device_transform=stages
    )
    model = fitted(datamodule, num_sanity_val_steps=2)
    trainer = quiet_trainer()
    trainer.test(model, datamodule=datamodule, verbose=False)
    trainer.predict(model, datamodule=datamodule)
    assert {split for split, batches in model.batches.items() if (x_of(batches[0]) >= 100).all()} == changed


def test_each_stage_has_its_own(path):
    stages = {"train": add_hundred, "eval": lambda batch: with_x(batch, torch.neg)}
    datamodule = LazyH5DataModule(path, path, x_key="x", with_index=True, batch_size=BATCH, device_transform=stages)
    model = fitted(datamodule)
    assert x_of(model.batches["train"][0]).min() >= 100
    assert x_of(model.batches["val"][0]).max() <= 0


# Draws ---------------------------------------------------------------------------------------------------------


def global_draws(batch):
    numbers = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
    return with_x(batch, lambda x: torch.tensor(numbers, dtype=torch.float64).repeat(len(x), 1))


def asked_draws(batch, rng, generator=None):
    numbers = [rng.random(), float(torch.rand((), generator=generator)), 0.0]
    return with_x(batch, lambda x: torch.tensor(numbers, dtype=torch.float64).repeat(len(x), 1))


class OwnDraws(torch.nn.Module):
    """Draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.numpy, self.torch = np.random.default_rng(), torch.Generator()

    def forward(self, batch):
        numbers = [self.numpy.random(), float(torch.rand((), generator=self.torch)), 0.0]
        return with_x(batch, lambda x: torch.tensor(numbers, dtype=torch.float64).repeat(len(x), 1))


DRAWS = {"global": lambda: global_draws, "asked": lambda: asked_draws, "own": OwnDraws}


def drawing(path, draws, **options):
    options = {"with_index": True, "batch_size": BATCH, "seed": 3} | options
    return LazyH5DataModule(path, x_key="x", device_transform=DRAWS[draws](), **options)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("draws", DRAWS)
def test_a_resumed_run_repeats_the_draws(path, tmp_path, draws, num_workers):
    whole = fitted(drawing(path, draws), max_epochs=3)
    values = [value[0] for epoch in range(3) for value in whole.drawn[epoch]]
    assert len(set(values)) == len(values) == 30, "each batch and epoch draws anew"
    broken, saving = Seen(fail_at=(1, 3)), SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        fitted(drawing(path, draws), broken, max_epochs=3, callbacks=[saving])
    torch.rand(7)
    resumed = Seen()
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(resumed, datamodule=drawing(path, draws, num_workers=num_workers), ckpt_path=saving.path)
    assert together(broken.drawn, resumed.drawn) == whole.drawn


def test_global_streams_go_on_as_if_nothing_had_been_drawn(path):
    def next_draws(transform):
        class After(Seen):
            def training_step(self, batch, batch_idx):
                self.drawn.setdefault(0, []).append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
                return self.layer(torch.ones(1, 1)).sum()

        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        datamodule = LazyH5DataModule(path, x_key="x", batch_size=BATCH, device_transform=transform)
        return fitted(datamodule, After()).drawn

    assert next_draws(global_draws) == next_draws(None)


def test_ranks_seeds_and_hosts_draw_otherwise(path):
    def first_draw(**options):
        options = {"seed": 0, "num_workers": 0} | options
        datamodule = LazyH5DataModule(path, x_key="x", batch_size=BATCH, shuffle=False, **options)
        datamodule.setup("fit")
        batch = next(iter(datamodule.train_dataloader()))
        return values_of(datamodule.on_after_batch_transfer(batch, 0))[:2]

    ranks = [first_draw(device_transform=asked_draws, distributed={"rank": rank, "world_size": 2}) for rank in range(2)]
    draws = [*ranks, first_draw(device_transform=asked_draws, seed=1), first_draw(batch_transform=asked_draws)]
    assert len({tuple(draw) for draw in draws}) == len(draws)
    assert first_draw(device_transform=asked_draws) == ranks[0]


def test_evaluation_repeats_its_draws_too(path):
    runs = [fitted(drawing(path, "asked", val_path=path), max_epochs=2).batches["val"] for _ in range(2)]
    draws = [[values_of(batch) for batch in batches] for batches in runs]
    assert draws[0] == draws[1]
    assert len({value[0] for value in draws[0]}) == 20


def test_a_stream_of_the_device_is_seeded_for_the_batch_and_restored(path, monkeypatch):
    """A device with one more stream, as GPUs have: here another generator of the CPU."""
    stream = torch.Generator().manual_seed(5)
    fake = SimpleNamespace(
        get_rng_state=lambda device: stream.get_state(), set_rng_state=lambda state, device: stream.set_state(state)
    )
    monkeypatch.setattr(device_transform, "_has_stream", lambda device: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    devices = []

    def draw(batch, generator):
        devices.append(generator.device.type)
        numbers = [float(torch.rand((), generator=each)) for each in (stream, generator)] + [float(torch.rand(()))]
        return with_x(batch, lambda x: torch.tensor(numbers, dtype=torch.float64).repeat(len(x), 1))

    def run():
        return fitted(
            LazyH5DataModule(path, x_key="x", with_index=True, batch_size=BATCH, device_transform=draw), max_epochs=2
        ).drawn

    first = run()
    assert first == run()
    assert stream.get_state().equal(torch.Generator().manual_seed(5).get_state())
    values = [value for epoch in first.values() for batch in epoch for value in batch[:3]]
    assert len(set(values)) == len(values) == 60


# Under the Trainer's options -----------------------------------------------------------------------------------


def test_it_gets_what_the_precision_plugin_makes(path):
    dtypes = []

    def look(batch):
        dtypes.append(x_of(batch).dtype)
        return batch

    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, batch_size=BATCH, device_transform=look)
    model = fitted(datamodule, precision="64-true", max_steps=2)
    assert dtypes == [torch.float64] * 2
    assert x_of(model.batches["train"][0]).dtype == torch.float64


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 3}, {"limit_train_batches": 4}, {"val_check_interval": 3, "limit_val_batches": 2}],
    ids=repr,
)
def test_draws_are_those_of_the_batch_whatever_the_trainer_does_between(path, options):
    whole = fitted(drawing(path, "asked", val_path=path), max_epochs=2, limit_val_batches=0)
    other = fitted(drawing(path, "asked", val_path=path), max_epochs=2, **options)
    for epoch in range(2):
        assert other.drawn[epoch] == whole.drawn[epoch][: len(other.drawn[epoch])]
        assert len(other.drawn[epoch]) == options.get("limit_train_batches", 10)


def test_overfitting_has_the_same_rows_and_new_draws(path):
    model = fitted(drawing(path, "asked"), max_epochs=2, overfit_batches=2)
    assert model.train_rows[0] == model.train_rows[1]
    assert len({batch[0] for epoch in range(2) for batch in model.drawn[epoch]}) == 4


def test_a_callback_that_looks_at_a_batch_changes_no_draw(path):
    class Looks(Seen):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                next(iter(self.trainer.train_dataloader))

    assert fitted(drawing(path, "asked"), Looks()).drawn == fitted(drawing(path, "asked")).drawn


def test_another_loader_of_the_trainer_is_left_alone(path):
    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, batch_size=BATCH, device_transform=add_hundred)
    model = fitted(datamodule)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 3), batch_size=4)
    trainer = quiet_trainer()
    trainer.fit(Seen(), datamodule=datamodule)
    trainer.test(model, dataloaders=loader, verbose=False)
    assert [batch.sum().item() for batch in model.batches["test"]] == [0, 0]


def test_a_module_goes_where_the_batch_is(path):
    layer = torch.nn.Linear(3, 2)
    datamodule = LazyH5DataModule(path, x_key="x", device_transform=layer)
    moved = datamodule.on_after_batch_transfer(torch.ones(4, 3, device="meta"), 0)
    assert layer.weight.device == moved.device == torch.device("meta")


def test_a_module_is_not_trained(path):
    layer = torch.nn.Linear(3, 2)
    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, device_transform=lambda batch: with_x(batch, layer))
    model = fitted(datamodule)
    assert not x_of(model.batches["train"][0]).requires_grad


def test_without_a_trainer_it_is_called_by_hand(path):
    datamodule = LazyH5DataModule(path, x_key="x", batch_size=BATCH, shuffle=False, device_transform=add_hundred)
    datamodule.setup("fit")
    for batch in datamodule.train_dataloader():
        assert datamodule.on_after_batch_transfer(batch, 0).equal(batch + 100)


def test_an_error_names_the_function_and_the_rows(path):
    def fail(batch):
        raise KeyError("what")

    datamodule = LazyH5DataModule(path, x_key="x", batch_size=BATCH, shuffle=False, device_transform=fail)
    with pytest.raises(KeyError) as failure:
        fitted(datamodule)
    (note,) = [note for note in failure.value.__notes__ if "device_transform" in note]
    assert re.search(r"by device_transform '.*fail' for rows 0, 1, 2.* of '.*rows.h5'", note)


# Hooks of users ------------------------------------------------------------------------------------------------


class Doubles(Seen):
    """A model with a hook of its own."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return with_x(batch, lambda x: 2 * x)


@pytest.mark.parametrize(("transform", "smallest"), [(None, 0), (add_hundred, 200), ({"eval": add_hundred}, 0)])
def test_the_hook_of_a_model_runs_after_it(path, transform, smallest):
    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, batch_size=BATCH, device_transform=transform)
    with warnings.catch_warnings():
        # Lightning explains that a model's hook is used beside a data module without one.
        warnings.filterwarnings("ignore", message="You have overridden `on_after_batch_transfer` in `LightningModule`")
        model = fitted(datamodule, Doubles())
    values = sorted(value for batch in model.batches["train"] for value in x_of(batch)[:, 0].tolist())
    assert values == [smallest + 2 * row for row in range(N_ROWS)]


def test_lightning_sees_a_hook_only_if_there_is_a_transform(path):
    assert not is_overridden(HOOK, LazyH5DataModule(path, x_key="x"))
    datamodule = LazyH5DataModule(path, x_key="x", device_transform=add_hundred)
    assert is_overridden(HOOK, datamodule)
    datamodule.device_transform = None
    assert not is_overridden(HOOK, datamodule)


class CallsSuper(LazyH5DataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return with_x(super().on_after_batch_transfer(batch, dataloader_idx), torch.neg)


class CallsByName(LazyH5DataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return with_x(LazyH5DataModule.on_after_batch_transfer(self, batch, dataloader_idx), torch.neg)


class ForgetsSuper(LazyH5DataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


@pytest.mark.parametrize("kind", [CallsSuper, CallsByName])
@pytest.mark.parametrize(("transform", "largest"), [(add_hundred, -100), (None, 0)])
def test_a_subclass_adds_to_it(path, kind, transform, largest):
    datamodule = kind(path, x_key="x", with_index=True, batch_size=BATCH, device_transform=transform)
    assert max(x_of(batch).max().item() for batch in fitted(datamodule).batches["train"]) == largest


def test_a_subclass_that_would_skip_it_is_refused(path):
    ForgetsSuper(path, x_key="x")
    text = r"ForgetsSuper.on_after_batch_transfer' replaces the hook .* super\(\).on_after_batch_transfer"
    with pytest.raises(H5ValueError, match=text):
        ForgetsSuper(path, x_key="x", device_transform=add_hundred)
    datamodule = LazyH5DataModule(path, x_key="x", device_transform=add_hundred)
    datamodule.on_after_batch_transfer = lambda batch, dataloader_idx: batch
    with pytest.raises(H5ValueError, match="replaces the hook"):
        datamodule.setup("fit")


def test_steps_that_take_batches_themselves_are_refused(path):
    class Takes(Seen):
        def training_step(self, dataloader_iter):
            raise AssertionError

    datamodule = LazyH5DataModule(path, x_key="x", with_index=True, device_transform=add_hundred)
    warnings.filterwarnings("ignore", message="You are using the `dataloader_iter` step flavor")
    with pytest.raises(H5ValueError, match=r"device_transform was given, but Takes.training_step .*dataloader_iter"):
        fitted(datamodule, Takes())


# What is given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (3, "device_transform=3"),
        ([add_hundred], "Compose"),
        ({"trains": add_hundred}, "no stage 'trains'. Did you mean 'train'?"),
        ({"val": add_hundred}, "'train', 'eval'"),
        ({"train": 3}, "device_transform['train']=3"),
    ],
)
def test_what_is_no_transform_is_refused(path, transform, words):
    with pytest.raises(H5ValueError, match=re.escape(words)):
        LazyH5DataModule(path, x_key="x", device_transform=transform)


class Adds:
    """A transform with an argument, for a config."""

    def __init__(self, number: float = 100.0):
        self.number = number

    def __call__(self, batch: object) -> object:
        return with_x(batch, lambda x: x + self.number)


class PrintsRange(Seen):
    """Prints the smallest input of each stage."""

    def on_train_end(self):
        for split in ("train", "val"):
            print(split, min(x_of(batch).min().item() for batch in self.batches[split]))


ADDS = "{class_path: test_device_transform.Adds, init_args: {number: 7}}"


@pytest.mark.parametrize(
    ("setting", "train", "val"),
    [(ADDS, 7.0, 7.0), (f"{{train: {ADDS}}}", 7.0, 0.0), ("test_device_transform.add_hundred", 100.0, 100.0)],
)
def test_a_config_names_it(path, tmp_path, capsys, setting, train, val):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
seed_everything: 1
trainer: {{max_epochs: 1, logger: false, num_sanity_val_steps: 0, default_root_dir: {tmp_path}}}
model: {{class_path: test_device_transform.PrintsRange}}
data:
  class_path: LazyH5DataModule
  init_args:
    train_path: {path}
    val_path: {path}
    x_key: x
    with_index: true
    device_transform: {setting}
"""
    )
    main(["fit", "--config", str(config), "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"])
    out = capsys.readouterr().out
    assert f"train {train}" in out
    assert f"val {val}" in out
