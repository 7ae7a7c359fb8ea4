"""Find the largest batch size for a model, by Lightning's batch size finder."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from .._lightning import LightningModule, Trainer, Tuner
from ..errors import H5ValueError

__all__ = ["calculate_optimal_batch_size"]

ON_CPU = 32  # memory is not the limit there, and larger batches are not faster
MARGIN = 0.8  # other batches and processes may take more memory than the trial


def calculate_optimal_batch_size(
    model: torch.nn.Module, input_shape: Sequence[int], device: str | torch.device = "cuda", *, most: int = 4096
) -> int:
    """Return the largest batch size that fits into memory in a training step, less a margin.

    Trains on random numbers and doubles the batch size until memory runs out. The model's weights do not change.

    Args:
        model: accepts a float tensor of shape ``(batch, *input_shape)``.
        input_shape: shape of one sample.
        device: device of the training. For "cpu" the result is 32, since memory is not the limit.
        most: largest size to try.

    Returns:
        The number of rows of a batch, at least 1.

    Raises:
        H5ValueError: a number is less than 1.
    """
    if most < 1 or any(n < 1 for n in input_shape):
        raise H5ValueError(f"input_shape={tuple(input_shape)} and most={most} were given. Pass numbers of 1 or more.")
    kind = torch.device(device).type
    if kind == "cpu":
        return min(ON_CPU, most)
    return max(1, int(MARGIN * largest_batch(model, input_shape, kind, most)))


def largest_batch(model: torch.nn.Module, input_shape: Sequence[int], accelerator: str, most: int) -> int:
    """Return the largest power of two, up to ``most``, that fits into memory in a training step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        step = _Step(model, tuple(input_shape), most)
        size = Tuner(trainer).scale_batch_size(step, steps_per_trial=1, init_val=2, max_trials=most.bit_length())
    return min(most, int(size or 1))


class _Step(LightningModule):
    """A training step on random numbers with a learning rate of zero."""

    def __init__(self, model: torch.nn.Module, shape: tuple[int, ...], n_rows: int) -> None:
        super().__init__()
        self.model, self.batch_size = model, 2  # BatchNorm fails on a single row
        self._rows = TensorDataset(torch.randn(1, *shape).expand(n_rows, *shape))

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(self._rows, batch_size=self.batch_size)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        output: Any = self.model(batch[0])
        while not isinstance(output, torch.Tensor):
            output = next(iter(output.values() if isinstance(output, dict) else output))
        return output.float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)
