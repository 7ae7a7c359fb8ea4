"""Small modules for tests that train, and a trainer that says nothing."""

from typing import ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Recorder(LightningModule):
    """Remembers the indices of the rows it sees, by stage and epoch; wants ``with_index=True``."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fail_at = fail_at
        self.train_rows = {}
        self.rows = {"val": [], "test": [], "predict": []}

    def training_step(self, batch, batch_idx):
        if self.fail_at == (self.current_epoch, batch_idx):
            raise RuntimeError("stop here")
        self.train_rows.setdefault(self.current_epoch, []).extend(index_of(batch))
        return self.layer(torch.ones(1, 1, device=self.device)).sum()

    def validation_step(self, batch, batch_idx):
        self.rows["val"] += index_of(batch)

    def test_step(self, batch, batch_idx):
        self.rows["test"] += index_of(batch)

    def predict_step(self, batch, batch_idx):
        self.rows["predict"] += index_of(batch)
        return torch.tensor(index_of(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveOnException(Callback):
    """Saves when training fails. (Lightning's own takes part in choosing the checkpoint to start from, too.)"""

    def __init__(self, folder, name="exception"):
        self.path = folder / f"{name}.ckpt"

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


class SaveAndStop(Callback):
    """Saves a checkpoint after a step, and ends the run."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def together(broken, resumed):
    """Rows of two runs, epoch by epoch."""
    return {epoch: broken.get(epoch, []) + resumed.get(epoch, []) for epoch in {*broken, *resumed}}


def index_of(batch):
    return (batch["index"] if isinstance(batch, dict) else batch[-1]).tolist()


def quiet_trainer(**options):
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    return Trainer(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **options)


class Ordinary(LightningModule):
    """A model in float32 as users write them: it takes a batch as it comes, and converts nothing."""

    batches: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 100)

    def training_step(self, batch, batch_idx):
        x, y = batch if has_target(batch) else (batch, None)
        if isinstance(x, tuple | list):
            x = torch.stack(x, dim=-1)
        self.batches.append((x, y))
        logits = self.layer(x.flatten(1)[:, :1] if x.ndim > 1 else x[:, None])
        if y is None:
            return logits.mean()
        if y.is_floating_point():
            return torch.nn.functional.mse_loss(logits[:, 0], y)
        return torch.nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def has_target(batch):
    """Whether a batch is a pair of an input and a target, and not several inputs."""
    return isinstance(batch, tuple | list) and len(batch) == 2 and batch[1].ndim == 1
