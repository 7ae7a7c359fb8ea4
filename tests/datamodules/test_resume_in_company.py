"""Exact resume while others use the data module: callbacks that look, other Trainers, subclasses of all kinds."""

import numpy as np
import pytest
import torch.distributed
from lightning.pytorch.callbacks import Callback
from lightning_models import Recorder, SaveOnException, index_of, quiet_trainer, together
from processes import run_ranks, values

from lightning_h5 import H5ResumeError, LazyH5DataModule

ROWS, BATCH, STEPS, EPOCHS = 60, 8, 8, 3
STOP = (1, 3)


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.arange(ROWS)})


def module(file, kind=LazyH5DataModule, **options):
    return kind(file, file, **({"batch_size": BATCH, "with_index": True} | options))


@pytest.fixture
def whole(file):
    model = Recorder()
    quiet_trainer(max_epochs=EPOCHS).fit(model, datamodule=module(file))
    return model.train_rows


def broken_and_resumed(path, make, model=Recorder, callbacks=(), stop=STOP):
    """Rows of a run that fails at ``stop`` and of the one that goes on from there, epoch by epoch."""
    broken, resumed = model(fail_at=stop), model()
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=EPOCHS, callbacks=[*callbacks, SaveOnException(path.parent, path.stem)]).fit(
            broken, datamodule=make()
        )
    quiet_trainer(max_epochs=EPOCHS, callbacks=[*callbacks]).fit(resumed, datamodule=make(), ckpt_path=path)
    return together(broken.train_rows, resumed.train_rows)


def stopped_and_resumed(path, make, model=Recorder, callbacks=(), between=lambda trainer, datamodule: None):
    """The same for a run that ``max_steps`` stops in mid-epoch, which Lightning counts as an end."""
    stopped, resumed, datamodule = model(), model(), make()
    trainer = quiet_trainer(max_epochs=-1, max_steps=STEPS + 3, callbacks=[*callbacks])
    trainer.fit(stopped, datamodule=datamodule)
    between(trainer, datamodule)
    trainer.save_checkpoint(path)
    quiet_trainer(max_epochs=EPOCHS, callbacks=[*callbacks]).fit(resumed, datamodule=make(), ckpt_path=path)
    return together(stopped.train_rows, resumed.train_rows)


WAYS = pytest.mark.parametrize("way", [broken_and_resumed, stopped_and_resumed])


def look(trainer):
    for batch in trainer.datamodule.train_dataloader():
        assert len(index_of(batch)) == BATCH
        break


class LooksInSetup(Recorder):
    def setup(self, stage):
        look(self.trainer)


class SetsUpAgain(Recorder):
    def configure_optimizers(self):
        self.trainer.datamodule.setup("fit")
        return super().configure_optimizers()


@pytest.mark.wide
@WAYS
@pytest.mark.parametrize("model", [LooksInSetup, SetsUpAgain])
def test_a_model_may_look_at_the_data_before_training(tmp_path, file, whole, way, model):
    assert way(tmp_path / "c.ckpt", lambda: module(file), model) == whole


HOOKS = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"]


@pytest.mark.wide
@WAYS
@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_may_look_at_a_batch_anywhere(tmp_path, file, whole, way, hook):
    callback = Callback()
    setattr(callback, hook, lambda trainer, *_, **__: look(trainer))
    assert way(tmp_path / "c.ckpt", lambda: module(file), callbacks=[callback]) == whole


class LooksAndSaves(Callback):
    """One callback looks at the new epoch where another saves the end of the old one."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, trainer, *_):
        look(trainer)
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def test_looking_at_an_epoch_does_not_begin_it(tmp_path, file, whole):
    quiet_trainer(max_epochs=EPOCHS, callbacks=[LooksAndSaves(tmp_path / "c.ckpt")]).fit(
        Recorder(), datamodule=module(file)
    )
    resumed = Recorder()
    quiet_trainer(max_epochs=EPOCHS).fit(resumed, datamodule=module(file), ckpt_path=tmp_path / "c.ckpt")
    assert resumed.train_rows == {1: whole[1], 2: whole[2]}


class MakesLargerBatches(Callback):
    """A loader with other batches is made, and is not the one that is trained on."""

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if batch_idx == 2:
            trainer.datamodule.batch_size = 32
            trainer.datamodule.train_dataloader()
            trainer.datamodule.batch_size = BATCH


@WAYS
def test_loaders_that_are_not_trained_on_do_not_count(tmp_path, file, whole, way):
    assert way(tmp_path / "c.ckpt", lambda: module(file), callbacks=[MakesLargerBatches()]) == whole


class ValidatesElsewhere(Callback):
    def __init__(self, hook):
        setattr(self, hook, self.validate)

    def validate(self, trainer, model, *batch):
        if trainer.current_epoch == 1 and (not batch or batch[-1] == 1):
            datamodule, seen = trainer.datamodule, Recorder()
            quiet_trainer().validate(seen, datamodule=datamodule, verbose=False)
            assert seen.rows["val"] == list(range(ROWS))


@pytest.mark.wide
@WAYS
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end"])
def test_another_trainer_may_validate_with_the_same_data_module(tmp_path, file, whole, way, hook, num_workers):
    make = lambda: module(file, num_workers=num_workers)  # noqa: E731
    assert way(tmp_path / "c.ckpt", make, callbacks=[ValidatesElsewhere(hook)]) == whole


def test_a_checkpoint_that_is_saved_after_another_trainer_validated_is_exact(tmp_path, file, whole):
    validate = lambda _, datamodule: quiet_trainer().validate(Recorder(), datamodule=datamodule)  # noqa: E731
    assert stopped_and_resumed(tmp_path / "c.ckpt", lambda: module(file), between=validate) == whole


def test_a_checkpoint_that_is_saved_after_another_trainer_trained_is_refused(tmp_path, file, whole):
    longer = quiet_trainer(max_epochs=-1, max_steps=STEPS + 5)
    train = lambda _, datamodule: longer.fit(Recorder(), datamodule=datamodule)  # noqa: E731
    with pytest.raises(H5ResumeError, match="after 5 batches of an epoch, but its trainer had trained on 3"):
        stopped_and_resumed(tmp_path / "c.ckpt", lambda: module(file), between=train)


def fits_elsewhere(datamodule):
    quiet_trainer(max_epochs=1).fit(Recorder(), datamodule=datamodule)


def validates_elsewhere(datamodule):
    quiet_trainer().validate(Recorder(), datamodule=datamodule, verbose=False)


class FailsToValidate(Recorder):
    def validation_step(self, batch, batch_idx):
        raise OSError("no space left for figures")


def fails_elsewhere(datamodule):
    quiet_trainer().validate(FailsToValidate(), datamodule=datamodule, verbose=False)


class UsesElsewhere(Callback):
    """Uses the data module in another Trainer within a batch, and goes on whatever comes of it."""

    def __init__(self, hook, use):
        setattr(self, hook, self.call)
        self.use, self.errors = use, []

    def call(self, trainer, *args):
        if not trainer.sanity_checking and args[-1] == 1:  # the second batch
            try:
                self.use(trainer.datamodule)
            except (OSError, ValueError) as error:
                self.errors.append(error)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_batch_end"])
@pytest.mark.parametrize("use", [fits_elsewhere, validates_elsewhere, fails_elsewhere])
def test_a_use_in_another_trainer_does_not_end_the_fit_even_if_it_fails(file, whole, hook, use):
    model, elsewhere = Recorder(), UsesElsewhere(hook, use)
    quiet_trainer(max_epochs=EPOCHS, callbacks=[elsewhere]).fit(model, datamodule=module(file))
    assert model.train_rows == whole
    assert model.rows["val"][-EPOCHS * ROWS :] == list(range(ROWS)) * EPOCHS
    assert len(elsewhere.errors) == (0 if use is validates_elsewhere else EPOCHS)


class FitsElsewhere(Callback):
    def on_train_batch_start(self, trainer, *_):
        fits_elsewhere(trainer.datamodule)


def test_two_fits_at_once_with_one_data_module_are_refused(file):
    with pytest.raises(ValueError, match="this data module is still in use by the fit of another Trainer"):
        quiet_trainer(callbacks=[FitsElsewhere()]).fit(Recorder(), datamodule=module(file))


class SetsUpOnce(LazyH5DataModule):
    """A common saving."""

    def setup(self, stage=None):
        if not self._datasets:
            super().setup(stage)


class AddsToTheState(LazyH5DataModule):
    def state_dict(self):
        return super().state_dict() | {"mine": 1}

    def load_state_dict(self, state_dict):
        assert state_dict["mine"] == 1
        super().load_state_dict(state_dict)


@WAYS
@pytest.mark.parametrize("kind", [SetsUpOnce, AddsToTheState])
def test_subclasses_resume_exactly(tmp_path, file, whole, way, kind):
    assert way(tmp_path / "c.ckpt", lambda: module(file, kind)) == whole


def test_a_subclass_that_sets_up_once_begins_each_fit_anew(tmp_path, file, whole):
    make = lambda: module(file, SetsUpOnce)  # noqa: E731
    broken_and_resumed(tmp_path / "c.ckpt", make)
    datamodule, fresh, resumed = make(), Recorder(), Recorder()
    quiet_trainer(max_epochs=EPOCHS).fit(Recorder(), datamodule=datamodule, ckpt_path=tmp_path / "c.ckpt")
    quiet_trainer(max_epochs=EPOCHS).fit(fresh, datamodule=datamodule)
    assert fresh.train_rows == whole
    quiet_trainer(max_epochs=EPOCHS).fit(resumed, datamodule=datamodule, ckpt_path=tmp_path / "c.ckpt")
    assert resumed.train_rows[1] == whole[1][STOP[1] * BATCH :]


class KeepsNoState(LazyH5DataModule):
    def state_dict(self):
        return {}


@WAYS
def test_a_checkpoint_in_mid_epoch_without_a_position_is_refused_however_it_came(tmp_path, file, way):
    with pytest.raises(H5ResumeError, match="holds no position of this data module"):
        way(tmp_path / "c.ckpt", lambda: module(file, KeepsNoState))


def test_a_fit_that_leaves_out_a_rest_says_so(file):
    trainer, datamodule = quiet_trainer(max_epochs=-1, max_steps=STEPS + 3), module(file)
    trainer.fit(Recorder(), datamodule=datamodule)
    trainer.fit_loop.epoch_loop.max_steps = 3 * STEPS
    with pytest.warns(UserWarning, match=r"stopped after 3 batches.*Pass ckpt_path"):
        trainer.fit(Recorder(), datamodule=datamodule)


def test_applying_the_position_by_hand_as_well_changes_nothing(tmp_path, file, whole):
    callback = Callback()
    callback.on_train_start = lambda trainer, _: trainer.datamodule.apply_position()
    assert broken_and_resumed(tmp_path / "c.ckpt", lambda: module(file), callbacks=[callback]) == whole


@pytest.mark.parametrize("same", [True, False], ids=["the same file", "another file"])
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")  # so it is
def test_a_loader_alone_goes_on_where_a_data_module_was(tmp_path, file, make_h5, whole, same):
    broken, resumed = Recorder(fail_at=STOP), Recorder()
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=EPOCHS, callbacks=[SaveOnException(tmp_path, "c")]).fit(
            broken, datamodule=module(file)
        )
    datamodule = module(file if same else make_h5({"x": np.arange(ROWS) + 1}))
    datamodule.setup("fit")
    trainer, loader = quiet_trainer(max_epochs=EPOCHS), datamodule.train_dataloader()
    if not same:
        with pytest.raises(H5ResumeError, match="files: saved"):
            trainer.fit(resumed, train_dataloaders=loader, ckpt_path=tmp_path / "c.ckpt")
        return
    trainer.fit(resumed, train_dataloaders=loader, ckpt_path=tmp_path / "c.ckpt")
    assert together(broken.train_rows, resumed.train_rows) == whole


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")  # so it is
def test_a_loader_alone_with_batches_of_another_size_is_refused(tmp_path, file):
    datamodule, larger = module(file), module(file, batch_size=20)
    for each in (datamodule, larger):
        each.setup("fit")
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[SaveOnException(tmp_path, "c")]).fit(
            Recorder(fail_at=STOP), train_dataloaders=datamodule.train_dataloader()
        )
    with pytest.raises(H5ResumeError, match=r"batches of 8 rows on 1 ranks.*batches of 20 on 1 ranks.*datamodule="):
        quiet_trainer().fit(Recorder(), train_dataloaders=larger.train_dataloader(), ckpt_path=tmp_path / "c.ckpt")


def alone_among_ranks(rank, file):
    quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(Recorder(), datamodule=module(file))
    model = Recorder()
    if rank == 0:
        quiet_trainer(devices=1).validate(
            model, datamodule=module(file, distributed={"setup_timeout": 5}), verbose=False
        )
        quiet_trainer(devices=1, max_epochs=1).fit(model, datamodule=module(file, distributed={"setup_timeout": 5}))
    torch.distributed.barrier()
    return model.rows["val"], model.train_rows


def test_a_trainer_of_one_device_has_all_rows_though_other_processes_are_about(tmp_path, file, whole):
    (val, train), _ = values(run_ranks(alone_among_ranks, 2, tmp_path, file))
    assert val[:ROWS] == list(range(ROWS))
    assert train == {0: whole[0]}
