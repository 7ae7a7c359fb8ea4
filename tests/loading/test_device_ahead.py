"""``prefetch_to_device``: batches are copied ahead, on a fake device, and are the same in the same steps."""

import h5py
import numpy as np
import pytest
import torch
from fake_device import FakeStream
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import CombinedHDF5DataModule, H5StatsMonitor, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.loading.device_ahead import STREAMS, DeviceAhead

N_ROWS, BATCH = 60, 4
KINDS = {
    "lazy": (LazyH5DataModule, {"x_key": "x", "y_key": "y"}),
    "rank cached": (RankCachedH5DataModule, {"x_key": "x", "y_key": "y"}),
    "combined": (CombinedHDF5DataModule, {"fields": ["x", "y"]}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("device_ahead") / "rows.h5"
    with h5py.File(path, "w") as file:
        values = np.arange(N_ROWS * 8, dtype="f4").reshape(N_ROWS, 8)
        file.create_dataset("x", data=values, chunks=(7, 8), compression="gzip")
        file["y"] = np.arange(N_ROWS)
    return str(path)


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setitem(STREAMS, "cpu", FakeStream)
    monkeypatch.setattr(FakeStream, "of_device", [])
    return FakeStream.of_device


def datamodule(path, kind="lazy", **options):
    made, keys = KINDS[kind]
    return made(path, **keys, **({"batch_size": BATCH, "with_index": True} | options))


class Seen(Recorder):
    """Keeps copies of all batches."""

    def __init__(self, fail_at=None):
        super().__init__(fail_at)
        self.batches = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        values = list(batch.values()) if isinstance(batch, dict) else batch
        self.batches.append([value.clone() for value in values])
        return loss


def trained(module, model=None, **options):
    model = Seen() if model is None else model
    quiet_trainer(**options).fit(model, datamodule=module)
    return model


def same(ours, others):
    return len(ours) == len(others) and all(
        all(map(torch.equal, one, other)) for one, other in zip(ours, others, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_get_the_batches_that_they_get_without(path, streams, kind, num_workers):
    expected = trained(datamodule(path, kind, num_workers=num_workers)).batches
    assert not streams
    batches = trained(datamodule(path, kind, num_workers=num_workers, prefetch_to_device=2)).batches
    assert same(batches, expected)
    assert [stream.n_ended for stream in streams] == [N_ROWS // BATCH] * 2
    assert max(max(stream.ahead) for stream in streams) <= 2


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_copies_are_under_way_while_a_step_runs(path, streams, depth):
    trained(datamodule(path, "rank cached", prefetch_to_device=depth), max_epochs=1)
    n_steps = N_ROWS // BATCH
    assert streams[0].ahead == [min(depth, n_steps - step) for step in range(1, n_steps + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_batches_of_steps_are_read(path, streams, kind):
    trained(datamodule(path, kind, prefetch_to_device=3), max_epochs=1, limit_train_batches=5)
    assert [stream.n_begun for stream in streams] == [5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_stopped_in_an_epoch_continues_with_its_rows(path, streams, kind, num_workers, tmp_path):
    options = {"prefetch_to_device": 2, "num_workers": num_workers}
    whole = trained(datamodule(path, kind)).train_rows
    first, save = Seen(fail_at=(1, 6)), SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        trained(datamodule(path, kind, **options), first, callbacks=[save])
    second = Seen()
    quiet_trainer().fit(second, datamodule=datamodule(path, kind, **options), ckpt_path=save.path)
    assert together(first.train_rows, second.train_rows) == whole


def test_an_error_is_raised_at_the_step_of_its_batch(path, streams):
    def fail(batch):
        if 17 in batch[1]:
            raise KeyError("seventeen")
        return batch

    order = trained(datamodule(path, "rank cached"), max_epochs=1).train_rows[0]
    model = Seen()
    with pytest.raises(KeyError, match="seventeen"):
        trained(datamodule(path, "rank cached", batch_transform=fail, prefetch_to_device=3), model)
    assert model.train_rows[0] == order[: order.index(17) // BATCH * BATCH]


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"precision": "bf16-true"}, {"precision": 64}])
def test_training_has_the_same_result(path, streams, options):
    def weights(**more):
        torch.manual_seed(0)
        return trained(datamodule(path, **more), Fits(), **options).layer.weight

    assert torch.equal(weights(), weights(prefetch_to_device=2))
    assert streams


class Fits(LightningModule):
    """Fits a line, in the dtype that the Trainer has chosen."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0] / 100).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_device_transform_draws_for_the_batch_of_the_step(path, streams):
    def jitter(batch):
        return [batch[0] + torch.rand(1), *batch[1:]]

    expected = trained(datamodule(path, device_transform=jitter)).batches
    assert same(trained(datamodule(path, device_transform=jitter, prefetch_to_device=2)).batches, expected)


def test_all_stages_copy_ahead(path, streams):
    module = datamodule(path, prefetch_to_device=1, batch_size=30, split=0.5)
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Seen(), datamodule=module)
    module = LazyH5DataModule(test_path=path, predict_path=path, x_key="x", with_index=True, prefetch_to_device=1)
    trainer.test(Seen(), datamodule=module, verbose=False)
    trainer.predict(Seen(), datamodule=module)
    assert len(streams) == 4


def test_the_cost_of_loading_is_measured_with_copies_ahead(path, streams, capsys):
    def run(**options):
        module = datamodule(path, batch_size=1, prefetch_to_device=2)
        return trained(module, callbacks=[H5StatsMonitor(**options)], max_epochs=3)

    measured = run()
    assert "ms with batches that are in memory" in capsys.readouterr().out
    assert same(measured.batches, run(measure_cost=False).batches)


def test_without_a_device_nothing_is_copied(path):
    assert "cpu" not in STREAMS
    assert same(trained(datamodule(path, prefetch_to_device=2)).batches, trained(datamodule(path)).batches)


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device"])
@pytest.mark.parametrize("of_model", [True, False])
def test_a_hook_for_host_memory_is_refused(path, hook, of_model):
    module, model = datamodule(path, prefetch_to_device=2), Seen()
    owner = model if of_model else module
    setattr(owner, hook, lambda batch, *rest: batch)
    with pytest.raises(H5ValueError, match=rf"{type(owner).__name__} overrides {hook}.*Remove prefetch_to_device"):
        trained(module, model)


def test_settings_that_make_no_sense_are_refused(path):
    with pytest.raises(H5ValueError, match="prefetch_to_device=2 was given with pin_memory=False"):
        datamodule(path, prefetch_to_device=2, pin_memory=False)
    with pytest.raises(H5ValueError, match="prefetch_to_device=-1"):
        datamodule(path, prefetch_to_device=-1)
    with pytest.raises(H5ValueError, match=r"memory.device='cuda' cannot be combined with prefetch_to_device=1"):
        datamodule(path, "rank cached", prefetch_to_device=1, memory={"device": "cuda"})


# One step at a time --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_a_batch_that_is_not_ready_is_not_waited_for(n_ready, depth):
    n, stream = len(n_ready), FakeStream(None)
    ahead, numbers, returned = DeviceAhead(stream, depth), iter(range(n)), []
    for step, n_of_step in enumerate(n_ready):
        ready, n_begun, is_empty = iter([True] * n_of_step), stream.n_begun, not len(ahead)
        returned.append(ahead.next(numbers.__next__, lambda ready=ready: next(ready, False), n - step))
        n_read = stream.n_begun - n_begun
        assert n_read <= n_of_step + is_empty  # only the batch of the step may be read although it is not ready
        assert len(ahead) <= min(depth, n - step - 1)
        assert len(ahead) == min(depth, n - step - 1) or n_read == n_of_step + is_empty
    assert returned == [*range(n)]
