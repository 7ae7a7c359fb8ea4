"""Signals to the whole job at any moment: the runs together train on the rows of the unbroken run, and end alike."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import lightning
import numpy as np
import pytest
import torch
from guards import HANG
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_models import Recorder, index_of, quiet_trainer
from processes import run_ranks

from lightning_h5 import H5ValueError, LazyH5DataModule, SaveOnPreemption

ROWS, EPOCHS, BATCH = 96, 3, 8


class Model(Recorder):
    """Notes rows in the order of training, and learns from them."""

    def __init__(self, rows_file, pause):
        super().__init__()
        self.rows_file, self.pause = rows_file, pause

    def training_step(self, batch, batch_idx):
        time.sleep(self.pause)
        x = (batch["x"] if isinstance(batch, dict) else batch[0]).float().mean().reshape(1, 1) / ROWS
        return self.layer(x).sum()

    def note(self, text):
        with open(self.rows_file, "a") as file:
            file.write(f"{self.current_epoch} {text}\n")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note(f"{batch_idx} {index_of(batch)}")

    def validation_step(self, batch, batch_idx):
        self.note(f"validation {index_of(batch)}")

    def on_train_epoch_end(self):
        self.note("end")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if lightning.__version__ < "2.5":  # after a resume it advances schedules of epochs once too often
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def train(rank, path, folder, method, num_workers, pause, devices, accumulate):
    """One incarnation of a job: resumes from the last checkpoint, if there is one."""
    for number in (signal.SIGUSR1, signal.SIGTERM):  # after the fit, which sets them back, there is nothing to save
        signal.signal(number, signal.SIG_IGN)
    (folder / f"group{rank}").write_text(str(os.getpgid(0)))
    torch.manual_seed(0)
    module = LazyH5DataModule(
        path,
        x_key="x",
        batch_size=BATCH,
        num_workers=num_workers,
        workers={"start_method": method},
        with_index=True,
        seed=1,
        split=0.2,
    )
    options = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    trainer = quiet_trainer(
        max_epochs=EPOCHS,
        callbacks=[SaveOnPreemption()],
        default_root_dir=folder,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        val_check_interval=0.5,
        **options,
    )
    model = Model(folder / f"rows{rank}.log", pause)
    ckpt_path = "hpc" if list(folder.glob("hpc_ckpt_*.ckpt")) else None
    trainer.fit(model, datamodule=module, ckpt_path=ckpt_path)
    if rank == 0:
        torch.save(model.layer.state_dict(), folder / "weights.pt")


def end_at(folder, seconds, number):
    """Send a signal to all processes of a job, a while after its first batch."""
    before = len(lines(folder, 0))
    end = time.monotonic() + HANG
    while len(lines(folder, 0)) == before and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(seconds)
    for group in folder.glob("group*"):  # of each rank, with its workers
        with suppress(ProcessLookupError):
            os.killpg(int(group.read_text()), number)


def lines(folder, rank):
    path = folder / f"rows{rank}.log"
    return path.read_text().splitlines() if path.exists() else []


def job(path, folder, draws=None, *, devices=1, method="fork", num_workers=0, accumulate=1):
    """Run a job, interrupted at random moments until it ends by itself; return rows of ranks, weights and stops."""
    folder.mkdir()
    n_stops = 0
    while True:
        arguments = (path, folder, method, num_workers, 0.0 if draws is None else 0.01, devices, accumulate)
        number = (
            None
            if draws is None or n_stops == (2 if method == "spawn" else 4)
            else draws.choice([signal.SIGUSR1, signal.SIGTERM])
        )
        if number is not None:
            sender = threading.Thread(target=end_at, args=(folder, draws.random() * 0.15, number))
            sender.start()
        done = run_ranks(train, devices, folder / f"logs{n_stops}", *arguments)
        if number is not None:
            sender.join()
        if (folder / "weights.pt").exists():
            assert all(one.exitcode == 0 for one in done), done
            return [lines(folder, rank) for rank in range(devices)], torch.load(folder / "weights.pt"), n_stops
        codes = {one.exitcode for one in done}
        assert number is not None, done
        assert codes <= {0, 128 + number, 128 + signal.SIGTERM}, done
        assert done[0].exitcode != 0, done
        n_stops += 1


@pytest.fixture
def path(make_h5):
    return make_h5({"x": np.arange(ROWS)})


CASES = [(1, "fork", 0), (1, "fork", 2), (2, "fork", 0), (2, "fork", 2), (1, "spawn", 2)]


def compare(path, tmp_path, draws, accumulate, devices, method, num_workers):
    options = {"devices": devices, "method": method, "num_workers": num_workers, "accumulate": accumulate}
    whole, weights, _ = job(path, tmp_path / "whole", **options)
    rows, found, n_stops = job(path, tmp_path / "broken", draws, **options)
    assert rows == whole
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    return n_stops


@pytest.mark.wide
@pytest.mark.parametrize(("devices", "method", "num_workers"), CASES)
def test_runs_that_were_preempted_are_together_the_unbroken_run(path, tmp_path, devices, method, num_workers):
    draws = random.Random(f"{devices}{method}{num_workers}")
    for attempt in range(3):  # on a busy machine, a signal can come when the run is over
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if compare(path, folder, draws, 1, devices, method, num_workers):
            return
    raise AssertionError("no run was stopped")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))  # 216 stops
def test_runs_that_were_preempted_at_random_are_together_the_unbroken_run(path, tmp_path, number):
    draws = random.Random(number)
    compare(path, tmp_path, draws, draws.choice([1, 2, 3]), *CASES[number % len(CASES)])


def test_signals_have_names():
    with pytest.raises(H5ValueError, match="list of signal names"):
        SaveOnPreemption(signals=["SIGNAL"])
    with pytest.raises(H5ValueError, match="list of signal names"):
        SaveOnPreemption(signals="SIGUSR1")


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3"}, "8_3"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_job_of_slurm_is_requeued(path, tmp_path, monkeypatch, caplog, environment, job, fails):
    """In this process: the signal arrives in the first step."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho refused >&2\nexit {int(fails)}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Signalled(Recorder):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGTERM)  # later, in the same step
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(callbacks=[SaveOnPreemption()], default_root_dir=tmp_path, plugins=[LightningEnvironment()])
    module = LazyH5DataModule(path, x_key="x", batch_size=BATCH, with_index=True)
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(Signalled(), datamodule=module)
    assert ended.value.code == (128 + signal.SIGUSR1 if fails else 0)
    assert (tmp_path / "asked").read_text() == f"requeue {job}\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
    assert ("refused" in caplog.text) == fails
    assert signal.getsignal(signal.SIGUSR1) == before


def test_it_saves_while_validation_is_due_by_the_clock(path, tmp_path):
    """From Lightning 2.6 on ``val_check_interval`` may be a time."""
    model = Told(tmp_path / "rows0.log", 2)
    options = {"val_check_interval": "00:01:00:00", "default_root_dir": tmp_path, "num_sanity_val_steps": 0}
    module = LazyH5DataModule(path, x_key="x", batch_size=BATCH, with_index=True, seed=1, split=0.2)
    try:
        trainer = quiet_trainer(callbacks=[SaveOnPreemption()], **options)
    except (TypeError, MisconfigurationException):
        pytest.skip("this Lightning takes no time")
    with pytest.raises(SystemExit):
        trainer.fit(model, datamodule=module)
    assert [line.split()[:2] for line in lines(tmp_path, 0)] == [["0", "0"], ["0", "1"], ["0", "2"]]
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


class Told(Model):
    """Is sent a signal in one step of the first epoch."""

    def __init__(self, rows_file, at):
        super().__init__(rows_file, 0)
        self.at = at

    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (0, self.at):
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("at", "n_validated"), [(0, 1.0), (4, 1.0), (9, 1.0), (9, 0)])  # batches 4 and 9 end a half
def test_no_validation_and_no_end_of_an_epoch_is_left_out(path, tmp_path, at, n_validated):
    def run(folder, at, ckpt_path=None):
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        model = Told(folder / "rows0.log", at)
        module = LazyH5DataModule(path, x_key="x", batch_size=BATCH, with_index=True, seed=1, split=0.2)
        options = {"num_sanity_val_steps": 0, "val_check_interval": 0.5, "default_root_dir": folder}
        options["limit_val_batches"] = n_validated
        quiet_trainer(callbacks=[SaveOnPreemption()], **options).fit(model, datamodule=module, ckpt_path=ckpt_path)
        return model

    whole = run(tmp_path / "whole", None)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "broken", at)
    assert ended.value.code == 128 + signal.SIGUSR1
    resumed = run(tmp_path / "broken", None, ckpt_path="hpc")
    assert lines(tmp_path / "broken", 0) == lines(tmp_path / "whole", 0)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def train_with_one_signal(rank, path, folder):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its teardown sets this back
    model = Told(folder / f"rows{rank}.log", 2 if rank == 1 else None)
    module = LazyH5DataModule(path, x_key="x", batch_size=BATCH, with_index=True, seed=1)
    options = {"devices": 2, "strategy": "ddp", "default_root_dir": folder}
    quiet_trainer(callbacks=[SaveOnPreemption()], **options).fit(model, datamodule=module)


def test_all_ranks_save_and_end_after_the_same_batch_if_one_is_sent_a_signal(path, tmp_path):
    done = run_ranks(train_with_one_signal, 2, tmp_path / "logs", path, tmp_path)
    assert [one.exitcode for one in done] == [128 + signal.SIGTERM, 0], done  # as Lightning expects of a child
    assert [len(lines(tmp_path, rank)) for rank in (0, 1)] == [3, 3]
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
