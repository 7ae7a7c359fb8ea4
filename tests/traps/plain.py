"""What people write around h5py and Lightning: a dataset, a data module, and each usual way to change them."""

import os

import h5py
import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, Subset


class H5Dataset(Dataset):
    """Opens its file where a row is first read, so that each worker opens its own."""

    def __init__(self, path, transform=None):
        self.path, self.transform, self.file = path, transform, None
        with h5py.File(path) as file:
            self.n_rows = len(file["x"])

    def __len__(self):
        return self.n_rows

    def __getitem__(self, row):
        if self.file is None:
            self.file = h5py.File(self.path)
        x, y = torch.as_tensor(self.file["x"][row]), torch.as_tensor(self.file["y"][row])
        return x if self.transform is None else self.transform(x), y, torch.as_tensor(row)

    def close(self):
        if self.file is not None:
            self.file.close()
        self.file = None


class PlainDataModule(LightningDataModule):
    """The same file for all stages; further options go to the loader."""

    def __init__(self, path, batch_size=2, transform=None, **options):
        super().__init__()
        self.path, self.batch_size, self.transform, self.options = path, batch_size, transform, options

    def setup(self, stage=None):
        self.dataset = H5Dataset(self.path, self.transform)

    def loader(self, shuffle):
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=shuffle, **self.options)

    def train_dataloader(self):
        return self.loader(shuffle=True)

    def val_dataloader(self):
        return self.loader(shuffle=False)

    test_dataloader = predict_dataloader = val_dataloader

    def teardown(self, stage=None):
        self.dataset.close()

    @property
    def replica(self):
        """Number of ranks and this rank, for a ``DistributedSampler``."""
        if self.trainer is None:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}


class SubsetPerRank(PlainDataModule):
    """Each rank's loader has the rows of this rank alone."""

    def loader(self, shuffle):
        rows = range(self.trainer.global_rank, len(self.dataset), self.trainer.world_size)
        return DataLoader(Subset(self.dataset, rows), batch_size=self.batch_size, shuffle=shuffle, **self.options)


class RankSampler(Sampler):
    """Every n-th row, from this rank's own on."""

    def __init__(self, n_rows, num_replicas, rank):
        self.rows = range(rank, n_rows, num_replicas)

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


class SamplerPerRank(PlainDataModule):
    """Each rank's sampler gives the rows of this rank alone."""

    def loader(self, shuffle):
        sampler = RankSampler(len(self.dataset), **self.replica)
        return DataLoader(self.dataset, batch_size=self.batch_size, sampler=sampler, **self.options)


class WithDistributedSampler(PlainDataModule):
    """The sampler that torch has for ranks: an order for each epoch, the same in each run."""

    def loader(self, shuffle):
        sampler = DistributedSampler(self.dataset, shuffle=shuffle, **self.replica)
        return DataLoader(self.dataset, batch_size=self.batch_size, sampler=sampler, **self.options)


class WithBatchSampler(PlainDataModule):
    """The same, in batches."""

    def loader(self, shuffle):
        sampler = DistributedSampler(self.dataset, shuffle=shuffle, **self.replica)
        batches = BatchSampler(sampler, self.batch_size, drop_last=False)
        return DataLoader(self.dataset, batch_sampler=batches, **self.options)


class SortedBatches(BatchSampler):
    """h5py takes a list of rows in increasing order."""

    def __iter__(self):
        return map(sorted, super().__iter__())


class ReadsWholeBatches(PlainDataModule):
    """Asks the dataset for a batch's rows at once, as torch's documentation has it for fast reads in bulk."""

    def loader(self, shuffle):
        batches = SortedBatches(RandomSampler(self.dataset), self.batch_size, drop_last=False)
        return DataLoader(self.dataset, sampler=batches, batch_size=None, **self.options)


class OpensAtOnce(PlainDataModule):
    """The file is opened with the dataset."""

    def setup(self, stage=None):
        super().setup(stage)
        self.dataset.file = h5py.File(self.path)


class ShufflesItself(H5Dataset):
    """Has an order of its own for each epoch."""

    def __init__(self, path):
        super().__init__(path)
        self.set_epoch(0)

    def set_epoch(self, epoch):
        self.order = np.random.default_rng(epoch).permutation(self.n_rows)

    def __getitem__(self, index):
        return super().__getitem__(int(self.order[index]))


class WithEpochs(PlainDataModule):
    """The dataset shuffles, and is told the epoch."""

    def setup(self, stage=None):
        self.dataset = ShufflesItself(self.path)
        self.trainer.callbacks.append(TellsTheEpoch())

    def train_dataloader(self):
        return self.loader(shuffle=False)


class TellsTheEpoch(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)


class FilePerRank(PlainDataModule):
    """Each rank has a file of its own; the Trainer leaves samplers alone."""

    def setup(self, stage=None):
        self.dataset = H5Dataset(self.path[self.trainer.global_rank])


class KeepsItsArguments(PlainDataModule):
    """Arguments go into checkpoints and come from YAML."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        val_fraction: float = 0.0,
        dtype: np.dtype | None = None,
        batch_size: int = 2,
    ):
        super().__init__(path, batch_size)
        self.save_hyperparameters()
