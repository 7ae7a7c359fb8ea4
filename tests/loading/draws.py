"""Transforms that draw: apart from the tests, so that a spawned worker imports no more than it needs."""

import random

import numpy as np
import torch


def draw_from_global_streams(x):
    return torch.tensor([random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)  # noqa: NPY002


def draw_of_the_row(x, rng):
    return torch.tensor(rng.random(), dtype=torch.float64)


def torch_draw_of_the_row(x, generator):
    return torch.rand((), dtype=torch.float64, generator=generator)


def draw_of_the_batch(batch, *, rng=None):
    return (batch[0] * 0 + rng.random(), *batch[1:])


def draw_while_collating(samples):
    return torch.rand(len(samples), dtype=torch.float64), torch.tensor([sample[-1] for sample in samples])
