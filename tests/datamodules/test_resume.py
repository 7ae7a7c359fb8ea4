"""Every way to stop, and the rest of the epoch after it: no row twice, none missing, the order of an unbroken run."""

import numpy as np
import pytest
import torch
from arguments import nested
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_models import Recorder, SaveAndStop, SaveOnException, quiet_trainer, together

from lightning_h5 import H5ResumeError, LazyH5DataModule

ROWS, BATCH, STEPS, EPOCHS = 60, 8, 8, 3


@pytest.fixture
def file(make_h5):
    return make_h5({"x": np.arange(ROWS)})


@pytest.fixture
def module(file):
    return lambda **options: LazyH5DataModule(
        file, file, **nested(**({"batch_size": BATCH, "with_index": True} | options))
    )


class OneCycle(Recorder):
    """Asks for the number of steps before Lightning has restored anything, as OneCycleLR needs it."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def rows_of_a_whole_run(module, kind=Recorder, **options):
    model = kind()
    quiet_trainer(max_epochs=EPOCHS, **options).fit(model, datamodule=module())
    return model.train_rows


def stop_and_go_on(*args, **options):
    """Rows of both runs: the first fails at ``stop``, the second goes on from what ``callback`` saved."""
    return tuple(model.train_rows for model in models_of_both_runs(*args, **options))


def models_of_both_runs(tmp_path, module, stop, callback, kind=Recorder, go_on=None, **options):
    broken = kind(fail_at=stop)
    options = {"max_epochs": EPOCHS, "enable_checkpointing": isinstance(callback, ModelCheckpoint)} | options
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[callback], **options).fit(broken, datamodule=module())
    resumed = kind()
    (saved,) = tmp_path.glob("*.ckpt")
    options |= {"callbacks": [], "enable_checkpointing": False}
    quiet_trainer(**options).fit(resumed, datamodule=(go_on or module)(), ckpt_path=saved)
    return broken, resumed


def at_each_batch(folder):
    return ModelCheckpoint(folder, filename="each", every_n_train_steps=1, save_top_k=1)


def on_exception(folder):
    return SaveOnException(folder)


WAYS = {"at each batch": at_each_batch, "on exception": on_exception}
STOPS = [(0, 1), (0, STEPS - 1), (1, 0), (1, 1), (1, 5), (2, STEPS - 1)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", STOPS)
def test_stopped_at_any_batch(tmp_path, module, way, stop):
    runs = stop_and_go_on(tmp_path, module, stop, WAYS[way](tmp_path))
    assert together(*runs) == rows_of_a_whole_run(module)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_with_workers(tmp_path, module, num_workers, persistent):
    workers = lambda: module(num_workers=num_workers, persistent_workers=persistent)  # noqa: E731
    runs = stop_and_go_on(tmp_path, workers, (1, 3), on_exception(tmp_path))
    assert together(*runs) == rows_of_a_whole_run(module)


OPTIONS = {
    "accumulating gradients": {"accumulate_grad_batches": 2},
    "reloading loaders": {"reload_dataloaders_every_n_epochs": 1},
    "validating in mid-epoch": {"val_check_interval": 3},
    "without a sanity check": {"num_sanity_val_steps": 0},
    "with a limit": {"limit_train_batches": 5},
}


@pytest.mark.wide
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [Recorder, OneCycle])
def test_with_options_of_the_trainer(tmp_path, module, options, kind):
    options = OPTIONS[options]
    runs = stop_and_go_on(tmp_path, module, (1, 3), on_exception(tmp_path), kind, **options)
    assert together(*runs) == rows_of_a_whole_run(module, kind, **options)


class SaveInValidation(Callback):
    """Saves in the middle of the validation that follows batch 6 of epoch 1."""

    def __init__(self, folder):
        self.folder = folder

    def on_validation_batch_end(self, trainer, *_):
        if not trainer.sanity_checking and (trainer.current_epoch, trainer.global_step) == (1, STEPS + 6):
            trainer.save_checkpoint(self.folder / "inside.ckpt")


def test_saved_inside_a_validation_in_mid_epoch(tmp_path, module):
    runs = stop_and_go_on(tmp_path, module, (1, 6), SaveInValidation(tmp_path), val_check_interval=3)
    assert together(*runs) == rows_of_a_whole_run(module)


class FailsInValidation(Recorder):
    def __init__(self, fail_at=None):
        super().__init__()
        self.fail_validation_at = fail_at

    def validation_step(self, batch, batch_idx):
        if self.fail_validation_at == (self.current_epoch, batch_idx):
            raise RuntimeError("stop here")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{}, {"eval_batch_size": 20}, {"eval_batch_size": 3}])
@pytest.mark.parametrize("val_check_interval", [1.0, 3])
def test_a_validation_in_which_the_run_stopped_visits_each_row(tmp_path, module, options, val_check_interval):
    broken, resumed = models_of_both_runs(
        tmp_path,
        module,
        (1, 4),
        on_exception(tmp_path),
        FailsInValidation,
        lambda: module(**options),
        val_check_interval=val_check_interval,
        num_sanity_val_steps=0,
    )
    assert together(broken.train_rows, resumed.train_rows) == rows_of_a_whole_run(module)
    assert resumed.rows["val"] == [*range(ROWS)] * {1.0: 2, 3: 4}[val_check_interval]


def test_saved_at_the_end_of_an_epoch(tmp_path, module):
    keep = ModelCheckpoint(tmp_path, filename="end", every_n_epochs=1, save_on_train_epoch_end=True)
    broken, resumed = stop_and_go_on(tmp_path, module, (2, 4), keep)
    whole = rows_of_a_whole_run(module)
    assert {epoch: broken[epoch] for epoch in (0, 1)} == {epoch: whole[epoch] for epoch in (0, 1)}
    assert resumed == {2: whole[2]}


@pytest.mark.wide
@pytest.mark.parametrize("then", [{"max_epochs": EPOCHS}, {"max_epochs": -1, "max_steps": EPOCHS * STEPS}])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("steps", [1, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS])
def test_stopped_by_max_steps(tmp_path, module, steps, last, then):
    """Also in mid-epoch, where Lightning itself counts the epoch as done and leaves its rest out."""
    keep = [ModelCheckpoint(tmp_path, save_last=True)] if last else []
    first, second = Recorder(), Recorder()
    trainer = quiet_trainer(max_epochs=-1, max_steps=steps, enable_checkpointing=last, callbacks=keep)
    trainer.fit(first, datamodule=module())
    if not last:
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    quiet_trainer(**then).fit(second, datamodule=module(), ckpt_path=tmp_path / "last.ckpt")
    assert together(first.train_rows, second.train_rows) == rows_of_a_whole_run(module)


class AsksForSteps(Recorder):
    """Has Lightning make the loaders before it has restored anything."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def test_stopped_by_max_steps_with_loaders_made_early(tmp_path, module):
    first, second = AsksForSteps(), AsksForSteps()
    trainer = quiet_trainer(max_epochs=-1, max_steps=STEPS + 3)
    trainer.fit(first, datamodule=module())
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    quiet_trainer(max_epochs=EPOCHS).fit(second, datamodule=module(), ckpt_path=tmp_path / "stopped.ckpt")
    assert together(first.train_rows, second.train_rows) == rows_of_a_whole_run(module)


def test_stopped_twice_in_one_epoch(tmp_path, module):
    seen = {}
    saved = None
    for at, stop in enumerate([(1, 2), (1, 5), None]):
        model = Recorder(fail_at=stop)
        keep = SaveOnException(tmp_path, f"stop{at}")
        trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=[keep])
        if stop is None:
            trainer.fit(model, datamodule=module(), ckpt_path=saved)
        else:
            with pytest.raises(RuntimeError, match="stop here"):
                trainer.fit(model, datamodule=module(), ckpt_path=saved)
        seen = together(seen, model.train_rows)
        saved = tmp_path / f"stop{at}.ckpt"
    assert seen == rows_of_a_whole_run(module)


@pytest.mark.parametrize("batch_size", [3, 5, 16])
def test_another_batch_size_goes_on_with_the_rest(tmp_path, module, batch_size):
    other = lambda: module(batch_size=batch_size)  # noqa: E731
    broken, resumed = stop_and_go_on(tmp_path, module, (1, 3), on_exception(tmp_path), go_on=other)
    whole = rows_of_a_whole_run(module)
    assert together(broken, resumed) == whole


def test_a_limit_counts_batches_of_the_present_size(tmp_path, module):
    """Four batches of 8 rows are eight of 4, more than the limit: the epoch is over."""
    smaller = lambda: module(batch_size=4)  # noqa: E731
    limit = {"limit_train_batches": 5}
    broken, resumed = stop_and_go_on(tmp_path, module, (0, 4), on_exception(tmp_path), go_on=smaller, **limit)
    whole = rows_of_a_whole_run(module)
    assert broken == {0: whole[0][:32]}
    assert resumed == {1: whole[1][:20], 2: whole[2][:20]}


def test_another_seed_is_refused_with_both_values(tmp_path, module):
    with pytest.raises(H5ResumeError, match=r"seed: saved 0, present 1"):
        stop_and_go_on(tmp_path, module, (1, 3), on_exception(tmp_path), go_on=lambda: module(seed=1))


def test_another_file_is_refused_with_both_values(tmp_path, module, make_h5):
    other = make_h5({"x": np.arange(ROWS) + 1})
    with pytest.raises(H5ResumeError, match=r"files: saved '.*', present '"):
        stop_and_go_on(
            tmp_path,
            module,
            (1, 3),
            on_exception(tmp_path),
            go_on=lambda: LazyH5DataModule(other, batch_size=BATCH, with_index=True),
        )


def test_a_checkpoint_that_was_validated_moves_no_later_fit(tmp_path, module):
    trainer = quiet_trainer(callbacks=[on_exception(tmp_path)])
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(Recorder(fail_at=(0, 3)), datamodule=module())
    (saved,) = tmp_path.glob("*.ckpt")
    datamodule, fresh = module(), Recorder()
    quiet_trainer().validate(Recorder(), datamodule=datamodule, ckpt_path=saved)
    quiet_trainer(max_epochs=EPOCHS).fit(fresh, datamodule=datamodule)
    assert fresh.train_rows == rows_of_a_whole_run(module)


@pytest.fixture
def saved(tmp_path, module):
    """A checkpoint from the middle of epoch 1, saved at an exception, and the rows trained on before it."""
    broken, callback = Recorder(fail_at=(1, 3)), SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(max_epochs=EPOCHS, callbacks=[callback]).fit(broken, datamodule=module())
    return callback.path, broken.train_rows


class RenamedDataModule(LazyH5DataModule):
    """Lightning keeps a data module's state under its class's name, and drops what stands under another."""


def test_a_renamed_data_module_goes_on_as_well(module, saved, file, caplog):
    path, before = saved
    resumed = Recorder()
    renamed = RenamedDataModule(file, file, batch_size=BATCH, with_index=True)
    quiet_trainer(max_epochs=EPOCHS).fit(resumed, datamodule=renamed, ckpt_path=path)
    assert together(before, resumed.train_rows) == rows_of_a_whole_run(module)
    assert "a data module 'LazyH5DataModule' saved this checkpoint" in caplog.text


def without_position(path, *others):
    checkpoint = torch.load(path, weights_only=True)
    position = checkpoint.pop("LazyH5DataModule")
    torch.save(checkpoint | dict.fromkeys(others, position), path)


@pytest.mark.parametrize("others", [(), ("One", "Another")], ids=["none", "two of other names"])
def test_a_checkpoint_in_mid_epoch_without_one_position_is_refused(saved, module, others):
    path, _ = saved
    without_position(path, *others)
    with pytest.raises(H5ResumeError, match=r"saved after 3 batches of an epoch, and holds no position"):
        quiet_trainer(max_epochs=EPOCHS).fit(Recorder(), datamodule=module(), ckpt_path=path)


def test_a_checkpoint_of_an_epochs_end_needs_no_position(tmp_path, module):
    """As of a run that was begun with another data module."""
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Recorder(), datamodule=module())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    without_position(tmp_path / "end.ckpt")
    resumed = Recorder()
    quiet_trainer(max_epochs=EPOCHS).fit(resumed, datamodule=module(), ckpt_path=tmp_path / "end.ckpt")
    whole = rows_of_a_whole_run(module)
    assert resumed.train_rows == {1: whole[1], 2: whole[2]}


def test_without_our_callback_a_resumed_run_is_stopped(saved, module, monkeypatch):
    path, _ = saved
    monkeypatch.setattr(LazyH5DataModule, "_insert_callbacks", lambda self: None)
    with pytest.raises(
        H5ResumeError, match=r"before its position was applied.*Leave SetEpochCallback in trainer.callbacks"
    ):
        quiet_trainer(max_epochs=EPOCHS).fit(Recorder(), datamodule=module(), ckpt_path=path)


MISMATCHES = {"another seed": {"seed": 1}, "another order": {"shuffle": False}, "drop_last": {"drop_last": True}}


@pytest.mark.wide
@pytest.mark.parametrize("mismatch", [*MISMATCHES, "another file", "no position"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_named_way_round_starts_the_broken_epoch_over(saved, module, make_h5, mismatch, num_workers):
    path, _ = saved
    options = MISMATCHES.get(mismatch, {}) | {"num_workers": num_workers}
    if mismatch == "no position":
        without_position(path)
    other = make_h5({"x": np.arange(ROWS) + 1}) if mismatch == "another file" else None
    again = lambda **more: (  # noqa: E731
        LazyH5DataModule(other, **nested(batch_size=BATCH, with_index=True, **options, **more))
        if other
        else module(**options, **more)
    )
    with pytest.raises(H5ResumeError, match=r"distributed=\{'on_resume_mismatch': 'restart_epoch'\}"):
        quiet_trainer(max_epochs=EPOCHS).fit(Recorder(), datamodule=again(), ckpt_path=path)
    resumed = Recorder()
    with pytest.warns(UserWarning, match=r"epoch 1 starts over"):
        quiet_trainer(max_epochs=EPOCHS).fit(
            resumed, datamodule=again(distributed={"on_resume_mismatch": "restart_epoch"}), ckpt_path=path
        )
    whole = rows_of_a_whole_run(again)
    assert resumed.train_rows == {1: whole[1], 2: whole[2]}


def test_the_named_way_round_changes_nothing_where_the_position_fits(saved, module):
    path, before = saved
    resumed = Recorder()
    willing = module(distributed={"on_resume_mismatch": "restart_epoch"})
    quiet_trainer(max_epochs=EPOCHS).fit(resumed, datamodule=willing, ckpt_path=path)
    assert together(before, resumed.train_rows) == rows_of_a_whole_run(module)


def test_a_second_fit_after_a_broken_one_begins_anew(module):
    """It is not resumed, though its trainer still counts the batches of the first."""
    broken, fresh = Recorder(fail_at=(1, 3)), Recorder()
    trainer, datamodule = quiet_trainer(max_epochs=EPOCHS), module()
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(broken, datamodule=datamodule)
    quiet_trainer(max_epochs=EPOCHS).fit(fresh, datamodule=datamodule)
    assert fresh.train_rows == rows_of_a_whole_run(module)


def stopped_by_max_steps(tmp_path, module, kind=Recorder):
    model = kind()
    trainer = quiet_trainer(max_epochs=1, max_steps=3)
    trainer.fit(model, datamodule=module())
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    return tmp_path / "stopped.ckpt", model.train_rows


def test_the_last_epoch_broken_off_by_max_steps_is_gone_on_with(tmp_path, module):
    """Lightning counts it as done: a run up to that epoch would end at once."""
    path, before = stopped_by_max_steps(tmp_path, module)
    resumed = Recorder()
    quiet_trainer(max_epochs=1).fit(resumed, datamodule=module(), ckpt_path=path)
    assert together(before, resumed.train_rows) == {0: rows_of_a_whole_run(module)[0]}


def test_a_position_that_the_trainer_has_no_use_for_is_spoken_of(tmp_path, module):
    """A schedule that asks for the number of steps makes Lightning decide before it has restored anything."""
    path, _ = stopped_by_max_steps(tmp_path, module, OneCycle)
    resumed = OneCycle()
    with pytest.warns(UserWarning, match="position was not used.*raise max_epochs by one"):
        quiet_trainer(max_epochs=1).fit(resumed, datamodule=module(), ckpt_path=path)
    assert resumed.train_rows == {}


CHAINS = {
    "an epoch's last batch, and twice in the next": ([STEPS, 3, 1], {}),
    "a failed step, and twice in the next epoch": ([(0, STEPS - 1), 3, 2], {}),
    "a limit's last batch, and in the next epoch": ([5, 2], {"limit_train_batches": 5}),
    "a failed step, and again before the limit": ([(0, 2), 2], {"limit_train_batches": 5}),
}


class SaveAfter(Callback):
    """Saves at the end of a batch of this start of the program, and ends it."""

    def __init__(self, path, n_batches):
        self.path, self.n_batches = path, n_batches

    def on_train_batch_end(self, trainer, *_):
        self.n_batches -= 1
        if self.n_batches == 0:
            trainer.save_checkpoint(self.path)
            raise RuntimeError("stop here")


@pytest.mark.parametrize("chain", CHAINS)
def test_several_stops_after_each_other(tmp_path, module, chain):
    """Lightning's own counters come to contradict each other in these, and later checkpoints hold them."""
    stops, options = CHAINS[chain]
    seen, saved = {}, None
    for number, stop in enumerate(stops):
        path = tmp_path / f"{number}.ckpt"
        model = Recorder(fail_at=stop if isinstance(stop, tuple) else None)
        save = SaveOnException(tmp_path, str(number)) if model.fail_at else SaveAfter(path, stop)
        with pytest.raises(RuntimeError, match="stop here"):
            quiet_trainer(max_epochs=EPOCHS, callbacks=[save], **options).fit(
                model, datamodule=module(), ckpt_path=saved
            )
        seen, saved = together(seen, model.train_rows), path
    model = Recorder()
    quiet_trainer(max_epochs=EPOCHS, **options).fit(model, datamodule=module(), ckpt_path=saved)
    assert together(seen, model.train_rows) == rows_of_a_whole_run(module, **options)


def test_a_fit_after_a_resumed_one_begins_anew(saved, module):
    path, _ = saved
    datamodule, fresh = module(), Recorder()
    first, second = quiet_trainer(max_epochs=EPOCHS), quiet_trainer(max_epochs=EPOCHS)
    first.fit(Recorder(), datamodule=datamodule, ckpt_path=path)
    second.fit(fresh, datamodule=datamodule)
    assert fresh.train_rows == rows_of_a_whole_run(module)


def test_a_fit_after_another_saves_its_own_position(tmp_path, module):
    datamodule, broken, resumed = module(), Recorder(fail_at=(1, 3)), Recorder()
    first = quiet_trainer(max_epochs=1)
    first.fit(Recorder(), datamodule=datamodule)
    second = quiet_trainer(max_epochs=EPOCHS, callbacks=[on_exception(tmp_path)])
    with pytest.raises(RuntimeError, match="stop here"):
        second.fit(broken, datamodule=datamodule)
    (saved,) = tmp_path.glob("*.ckpt")
    quiet_trainer(max_epochs=EPOCHS).fit(resumed, datamodule=datamodule, ckpt_path=saved)
    assert together(broken.train_rows, resumed.train_rows) == rows_of_a_whole_run(module)


class Twice(LazyH5DataModule):
    """As for two views of the same rows."""

    def train_dataloader(self):
        return {"one": super().train_dataloader(), "other": super().train_dataloader()}


class SeesBoth(Recorder):
    def training_step(self, batch, batch_idx):
        assert torch.equal(batch["one"][-1], batch["other"][-1])
        return super().training_step(batch["one"], batch_idx)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_loaders_of_one_data_module_go_on_together(tmp_path, file, module, num_workers):
    twice = lambda: Twice(file, file, batch_size=BATCH, with_index=True, num_workers=num_workers)  # noqa: E731
    runs = stop_and_go_on(tmp_path, twice, (1, 3), on_exception(tmp_path), SeesBoth)
    assert together(*runs) == rows_of_a_whole_run(module)


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 6}], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    "validation", [{}, {"limit_val_batches": 0}, {"check_val_every_n_epoch": 2}], ids=["each", "never", "every second"]
)
def test_a_run_saved_by_hand_after_the_last_step_of_an_epoch_goes_on(make_h5, tmp_path, validation, length, step):
    path = make_h5(x=np.zeros((8, 3), "f4"))
    options = {"num_sanity_val_steps": 0} | length | validation

    def fit(ckpt_path=None, callbacks=()):
        model = Recorder()
        datamodule = LazyH5DataModule(path, x_key="x", batch_size=4, with_index=True)
        quiet_trainer(callbacks=[*callbacks], **options).fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
        return model.train_rows

    checkpoint = tmp_path / "by_hand.ckpt"
    assert together(fit(callbacks=[SaveAndStop(step, checkpoint)]), fit(checkpoint)) == fit()
