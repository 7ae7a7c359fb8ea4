"""An error of dtypes in a step says that the file has them so, and what to pass; other errors are left alone."""

import numpy as np
import pytest
import torch
from arguments import nested
from lightning_models import Ordinary, quiet_trainer

from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule

MODULES = pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule])


class Convolution(Ordinary):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv1d(1, 1, 1)

    def training_step(self, batch, batch_idx):
        x = batch[0] if isinstance(batch, tuple | list) else batch
        return self.layer(x[:, None]).mean()


class Recurrent(Ordinary):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.GRU(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0])[0].mean()


class Broken(Ordinary):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x5 and 6x7)")


def notes_of(model, module):
    with pytest.raises(Exception) as raised:  # noqa: PT011  # torch's own, of which there are several
        quiet_trainer(fast_dev_run=True).fit(model, datamodule=module)
    return getattr(raised.value, "__notes__", [])


@pytest.mark.wide
@MODULES
@pytest.mark.parametrize("dtype", ["f2", "u1", "i2", "i4", "i8"])
@pytest.mark.parametrize("model", [Ordinary, Convolution, Recurrent])
def test_inputs_in_another_dtype_are_explained_and_the_advice_works(make_h5, module, dtype, model):
    path = make_h5(x=np.ones((20, 4), dtype), y=np.arange(20) % 2)
    (note,) = notes_of(model(), module(path, x_key="x", y_key="y", batch_size=4))
    name = np.dtype(dtype).name
    assert f"'x' is loaded as {name}, as stored in the file" in note
    assert "Pass x_dtype='float32'" in note
    quiet_trainer(fast_dev_run=True).fit(
        model(), datamodule=module(path, x_key="x", y_key="y", batch_size=4, x_dtype="float32")
    )


@MODULES
@pytest.mark.parametrize("dtype", ["i2", "i4"])
def test_classes_in_another_dtype_are_explained_and_the_advice_works(make_h5, module, dtype):
    path = make_h5(x=np.ones((20, 4), "f4"), y=(np.arange(20) % 2).astype(dtype))
    (note,) = notes_of(Ordinary(), module(path, x_key="x", y_key="y", batch_size=4))
    assert f"'y' is loaded as {np.dtype(dtype).name}" in note
    assert note.endswith("Pass y_dtype='int64' to the data module.")
    quiet_trainer(fast_dev_run=True).fit(
        Ordinary(), datamodule=module(path, x_key="x", y_key="y", batch_size=4, y_dtype="int64")
    )


class Loss(Ordinary):
    """A layer, or none, and a loss of the target as it comes."""

    def __init__(self, loss, layer=None):
        super().__init__()
        self.layer, self.first, self.loss = torch.nn.Linear(4, 1), layer or torch.nn.Identity(), loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.layer(self.first(batch[0]))[:, 0], batch[1])


F = torch.nn.functional


@MODULES
@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (F.huber_loss, "f8"), (F.huber_loss, "u4"),
        *((F.binary_cross_entropy_with_logits, dtype) for dtype in ("u1", "u2", "i4")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_targets_of_a_loss_are_explained_and_the_advice_works(make_h5, module, loss, dtype):
    """The input, which has the dtype of the parameters, has no part in it."""
    path = make_h5(x=np.ones((20, 4), "f4"), y=(np.arange(20) % 2).astype(dtype))
    options = {"x_key": "x", "y_key": "y", "batch_size": 4}
    (note,) = notes_of(Loss(loss), module(path, **options))
    assert f"'y' is loaded as {np.dtype(dtype).name}, as stored" in note
    assert "'float32'" in note
    quiet_trainer(fast_dev_run=True).fit(Loss(loss), datamodule=module(path, **options, y_dtype="float32"))


def index(output, target):
    return output[target].sum()


def embed(output, target):
    return torch.nn.functional.embedding(target, output[:, None]).sum()


def gather(output, target):
    return output.gather(0, target).sum()


def cross_entropy(output, target):
    return F.cross_entropy(torch.stack([output, output], 1), target)


@MODULES
@pytest.mark.parametrize("dtype", ["f4", "f8", "u2", "u4", "i2"])
@pytest.mark.parametrize("loss", [index, embed, gather, cross_entropy])
def test_classes_that_torch_wants_as_integers_are_explained_and_the_advice_works(make_h5, module, loss, dtype):
    path = make_h5(x=np.ones((20, 4), "f4"), y=(np.arange(20) % 2).astype(dtype))
    options = {"x_key": "x", "y_key": "y", "batch_size": 4}
    (note,) = notes_of(Loss(loss), module(path, **options))
    assert f"'y' is loaded as {np.dtype(dtype).name}, as stored" in note
    assert "Pass y_dtype='int64' " in note
    quiet_trainer(fast_dev_run=True).fit(Loss(loss), datamodule=module(path, **options, y_dtype="int64"))


class Tokens(Ordinary):
    """Takes a tuple of one, or the input alone."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(3, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()


@pytest.mark.parametrize("dtype", ["f4", "u2", "i2"])
def test_tokens_that_torch_wants_as_integers_are_explained(make_h5, dtype):
    (note,) = notes_of(Tokens(), LazyH5DataModule(make_h5(x=np.ones((20, 4), dtype)), x_key="x", batch_size=4))
    assert note.endswith("Pass x_dtype='int64' to the data module.")


@pytest.mark.parametrize("name", ["transform", "batch_transform"])
@pytest.mark.parametrize("dtype", ["u2", "u4", "u8"])
def test_a_dtype_with_which_torch_cannot_compute_in_a_transform_is_explained(make_h5, name, dtype):
    module = LazyH5DataModule(make_h5(x=np.ones((20, 4), dtype)), x_key="x", batch_size=4, **{name: lambda x: x + x})
    notes = notes_of(Ordinary(), module)
    assert f"'x' is loaded as {np.dtype(dtype).name}, as stored" in notes[-1]
    assert notes[-1].endswith("Pass x_dtype='float32' to the data module.")


@pytest.mark.parametrize("layer", [torch.nn.LayerNorm, torch.nn.BatchNorm1d])
@pytest.mark.parametrize("dtype", ["u1", "i8"])
def test_inputs_of_a_normalization_are_explained_and_the_advice_works(make_h5, layer, dtype):
    path = make_h5(x=np.ones((20, 4), dtype), y=np.zeros(20, dtype))
    options = {"x_key": "x", "y_key": "y", "batch_size": 4, "y_dtype": "float32"}
    (note, *_) = notes_of(Loss(F.mse_loss, layer(4)), LazyH5DataModule(path, **nested(**options)))
    assert f"'x' is loaded as {np.dtype(dtype).name}, as stored" in note
    assert "Pass x_dtype='float32'" in note
    quiet_trainer(fast_dev_run=True).fit(
        Loss(F.mse_loss, layer(4)), datamodule=LazyH5DataModule(path, **nested(**options, x_dtype="float32"))
    )


@pytest.mark.parametrize("name", ["transform", "batch_transform"])
def test_an_array_that_a_transform_may_have_changed_is_not_blamed(make_h5, name):
    path = make_h5(x=np.ones((20, 4), "u1"))
    module = LazyH5DataModule(path, **nested(x_key="x", batch_size=4, **{name: lambda x: x}))
    assert notes_of(Ordinary(), module) == []


def test_an_array_of_a_split_is_explained(make_h5):
    path = make_h5({"train/x": np.ones((20, 4), "u1"), "val/x": np.ones((20, 4), "u1")})
    (note,) = notes_of(Ordinary(), LazyH5DataModule(path, x_key="{split}/x", batch_size=4))
    assert "'train/x' is loaded as uint8" in note or "'val/x' is loaded as uint8" in note


@pytest.mark.parametrize(
    ("model", "x", "options"),
    [
        (Broken, np.ones((20, 4)), {}),
        (Ordinary, np.ones((20, 4)), {"x_dtype": "float64"}),
        (lambda: Ordinary().double(), np.ones((20, 4), "f4"), {"x_dtype": "float32"}),
    ],
    ids=["another error", "a dtype that was asked for", "a model in float64, and a dtype that was asked for"],
)
def test_other_errors_are_left_alone(make_h5, model, x, options):
    assert notes_of(model(), LazyH5DataModule(make_h5(x=x), **nested(x_key="x", batch_size=4, **options))) == []


def test_a_model_in_float64_is_told_so(make_h5):
    (note,) = notes_of(
        Ordinary().double(), LazyH5DataModule(make_h5(x=np.ones((20, 4), "f4")), x_key="x", batch_size=4)
    )
    assert "is loaded as float32" in note
    assert "x_dtype='float64'" in note


def test_inputs_and_targets_are_explained_together(make_h5):
    path = make_h5(x=np.ones((20, 4), "u1"), y=(np.arange(20) % 2).astype("i2"))
    of_x, of_y = notes_of(Ordinary(), LazyH5DataModule(path, x_key="x", y_key="y", batch_size=4))
    assert of_x.endswith("Pass x_dtype='float32' to the data module.")
    assert of_y.endswith("Pass y_dtype='int64' or 'float32' to the data module.")


@pytest.mark.parametrize(
    "error", [TypeError("unsupported operand type"), KeyError("type"), KeyboardInterrupt()], ids=repr
)
def test_errors_of_other_kinds_are_left_alone(make_h5, error):
    class Raises(Ordinary):
        def training_step(self, batch, batch_idx):
            raise error

    with pytest.raises((Exception, SystemExit, KeyboardInterrupt)):
        quiet_trainer(fast_dev_run=True).fit(
            Raises(), datamodule=LazyH5DataModule(make_h5(x=np.ones((20, 4))), x_key="x", batch_size=4)
        )
    assert not hasattr(error, "__notes__")
