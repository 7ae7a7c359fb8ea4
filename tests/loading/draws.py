"""Transforms that draw: apart from the tests, so that a spawned worker imports no more than it needs."""

import random
from functools import partial

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


class Randomizable:
    """Owns its generator, as transforms of MONAI do."""

    def __init__(self):
        self.R = np.random.RandomState(5)

    def set_random_state(self, seed=None, state=None):
        self.R = np.random.RandomState(seed) if state is None else state
        return self

    def __call__(self, x):
        return torch.tensor(self.R.random_sample(), dtype=torch.float64)


class Seeded:
    """Owns two, as those of Albumentations, which take images by name."""

    def __init__(self):
        self.set_random_seed(5)

    def set_random_seed(self, seed):
        self.rng, self.py_random = np.random.default_rng(seed), random.Random(seed)

    def set_random_state(self, random_generator, py_random):
        self.rng, self.py_random = random_generator, py_random

    def __call__(self, *, image):
        return {"image": image * 0 + self.rng.random() + self.py_random.random()}


class Owner:
    """Draws from a generator that it keeps, of any library."""

    def __init__(self, generator, draw):
        self.generator, self.draw = generator, draw

    def __call__(self, x):
        return torch.tensor(self.draw(self.generator), dtype=torch.float64)


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Augmented:
    def __init__(self):
        self.augment = Seeded()

    def __call__(self, x):
        return self.augment(image=x)["image"]


def torch_draw(generator):
    return torch.rand((), dtype=torch.float64, generator=generator).item()


def identity(x):
    return x


noise = Randomizable()


def draw_from_a_global_object(x):
    return noise(x)


def own_of_each_kind():
    augment = Seeded()
    return {
        "MONAI": Randomizable(),
        "Albumentations, in a class": Augmented(),
        "Albumentations, in a lambda": lambda x: augment(image=x)["image"],
        "a member of a Compose": Compose(identity, Compose(Randomizable())),
        "a torch module": torch.nn.Sequential(torch.nn.Identity(), Module(Randomizable())),
        "a partial": partial(apply, transform=Randomizable()),
        "RandomState": Owner(np.random.RandomState(5), np.random.RandomState.random_sample),
        "NumPy's Generator": Owner(np.random.default_rng(5), np.random.Generator.random),
        "Python's Random": Owner(random.Random(5), random.Random.random),
        "torch's Generator": Owner(torch.Generator().manual_seed(5), torch_draw),
        "a global object": draw_from_a_global_object,
    }


class Module(torch.nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform

    def forward(self, x):
        return self.transform(x)


def apply(x, transform):
    return transform(x)
