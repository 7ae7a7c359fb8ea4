"""An error of dtypes in a step says that the file has them so, and what to pass; other errors are left alone."""

import re

import numpy as np
import pytest
import torch
from arguments import nested
from hypothesis import given
from hypothesis import strategies as st
from lightning_models import Ordinary, quiet_trainer

from lightning_h5 import LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datamodules.dtype_errors import explain_dtype_error

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


@MODULES
@pytest.mark.parametrize("dtype", ["f8", "f2", "u1", "i2", "i4", "i8"])
@pytest.mark.parametrize("model", [Ordinary, Convolution, Recurrent])
def test_inputs_in_another_dtype_are_explained_and_the_advice_works(make_h5, module, dtype, model):
    path = make_h5(x=np.ones((20, 4), dtype), y=np.arange(20) % 2)
    (note,) = notes_of(model(), module(path, x_key="x", y_key="y", batch_size=4))
    name = np.dtype(dtype).name
    assert f"'x' comes as {name} since the file has it so" in note
    assert "Pass x_dtype='float32'" in note
    quiet_trainer(fast_dev_run=True).fit(
        model(), datamodule=module(path, x_key="x", y_key="y", batch_size=4, x_dtype="float32")
    )


@MODULES
@pytest.mark.parametrize("dtype", ["i2", "i4"])
def test_classes_in_another_dtype_are_explained_and_the_advice_works(make_h5, module, dtype):
    path = make_h5(x=np.ones((20, 4), "f4"), y=(np.arange(20) % 2).astype(dtype))
    (note,) = notes_of(Ordinary(), module(path, x_key="x", y_key="y", batch_size=4))
    assert f"'y' comes as {np.dtype(dtype).name}" in note
    assert "Pass y_dtype='int64'" in note
    quiet_trainer(fast_dev_run=True).fit(
        Ordinary(), datamodule=module(path, x_key="x", y_key="y", batch_size=4, y_dtype="int64")
    )


@pytest.mark.parametrize(
    ("text", "argument", "stored", "wanted"),
    [
        ("Found dtype Double but expected Float", "y_dtype", "f8", "float32"),  # a loss, before torch 2.13
        ("expected scalar type Long but found Int", "y_dtype", "i4", "int64"),
        ("Input type (torch.cuda.DoubleTensor) and weight type (torch.cuda.FloatTensor) should be the same",
         "x_dtype", ">f8", "float32"),
        ("expected m1 and m2 to have the same dtype, but got: double != float", "x_dtype", "f8", "float32"),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_what_other_versions_and_devices_say_is_explained(text, argument, stored, wanted):
    error = RuntimeError(text)
    assert explain_dtype_error(error, {(argument, "a"): np.dtype(stored)})
    (note,) = error.__notes__
    assert note.endswith(f"Pass {argument}={wanted!r} to the data module.")


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
        (F.huber_loss, "f8"), (F.huber_loss, "i8"), (F.huber_loss, "u4"), (F.l1_loss, "?"),
        *((F.binary_cross_entropy_with_logits, dtype) for dtype in ("?", "u1", "u2", "i4", "i8")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_targets_of_a_loss_are_explained_and_the_advice_works(make_h5, module, loss, dtype):
    """The input, which has the dtype of the parameters, has no part in it."""
    path = make_h5(x=np.ones((20, 4), "f4"), y=(np.arange(20) % 2).astype(dtype))
    options = {"x_key": "x", "y_key": "y", "batch_size": 4}
    (note,) = notes_of(Loss(loss), module(path, **options))
    assert f"'y' comes as {np.dtype(dtype).name} since" in note
    assert "Pass y_dtype='float32'" in note
    quiet_trainer(fast_dev_run=True).fit(Loss(loss), datamodule=module(path, **options, y_dtype="float32"))


@pytest.mark.parametrize("dtype", ["i2", "u4"])
def test_unsigned_classes_are_explained(make_h5, dtype):
    path = make_h5(x=np.ones((20, 4), "f4"), y=np.zeros(20, dtype))
    (note,) = notes_of(Ordinary(), LazyH5DataModule(path, x_key="x", y_key="y", batch_size=4))
    assert note.endswith("Pass y_dtype='int64' to the data module.")


@pytest.mark.parametrize("layer", [torch.nn.LayerNorm, torch.nn.BatchNorm1d])
@pytest.mark.parametrize("dtype", ["f8", "u1", "i8"])
def test_inputs_of_a_normalization_are_explained_and_the_advice_works(make_h5, layer, dtype):
    path = make_h5(x=np.ones((20, 4), dtype), y=np.zeros(20, dtype))
    options = {"x_key": "x", "y_key": "y", "batch_size": 4, "y_dtype": "float32"}
    (note,) = notes_of(Loss(F.mse_loss, layer(4)), LazyH5DataModule(path, **nested(**options)))
    assert f"'x' comes as {np.dtype(dtype).name} since" in note
    assert "Pass x_dtype='float32'" in note
    quiet_trainer(fast_dev_run=True).fit(
        Loss(F.mse_loss, layer(4)), datamodule=LazyH5DataModule(path, **nested(**options, x_dtype="float32"))
    )


@pytest.mark.parametrize("name", ["transform", "batch_transform"])
def test_an_array_that_a_transform_may_have_changed_is_not_blamed(make_h5, name):
    path = make_h5(x=np.ones((20, 4)))
    module = LazyH5DataModule(path, **nested(x_key="x", batch_size=4, **{name: lambda x: x}))
    assert notes_of(Ordinary(), module) == []


DTYPES = ["float16", "float32", "float64", "int64", "uint8"]
CALLED = {"float16": "Half", "float32": "Float", "float64": "Double", "int64": "Long", "uint8": "Byte"}


@given(
    x=st.sampled_from(DTYPES),
    y=st.sampled_from(DTYPES),
    found=st.sampled_from(DTYPES),
    expected=st.sampled_from(DTYPES),
    computes_in=st.sampled_from(DTYPES[:3]),
    text=st.sampled_from(
        ["Found dtype {} but expected {}", "mat1 and mat2 must have the same dtype, but got {} and {}"]
    ),
)
def test_no_array_of_the_dtype_of_the_parameters_is_blamed(x, y, found, expected, computes_in, text):
    error = RuntimeError(text.format(CALLED[found], CALLED[expected]))
    if explain_dtype_error(error, {("x_dtype", "x"): x, ("y_dtype", "y"): y}, {computes_in}):
        (note,) = error.__notes__
        blamed = re.search(r"'([xy])' comes as (\w+)", note)
        assert blamed[2] == {"x": x, "y": y}[blamed[1]] != computes_in
        assert f"Pass {blamed[1]}_dtype=" in note
        assert blamed[2] == found or "Found" not in text


@pytest.mark.parametrize(
    "text", ["mixed dtype (CPU): all", "result type Float can't be cast to the desired output type Long"]
)
def test_what_names_no_array_is_explained_inside_of_torch_alone(text):
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(text)
    assert not explain_dtype_error(raised.value, {("x_dtype", "x"): "int64", ("y_dtype", "y"): "int64"}, {"float32"})


def test_an_array_of_a_split_is_explained(make_h5):
    path = make_h5({"train/x": np.ones((20, 4)), "val/x": np.ones((20, 4))})
    (note,) = notes_of(Ordinary(), LazyH5DataModule(path, x_key="{split}/x", batch_size=4))
    assert "'train/x' comes as float64" in note or "'val/x' comes as float64" in note


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
    assert "comes as float32" in note
    assert "x_dtype='float64'" in note


def test_a_mismatch_inside_of_the_model_is_left_alone(make_h5):
    class Mixed(Ordinary):
        def training_step(self, batch, batch_idx):
            return self.layer(torch.ones(3, 1, dtype=torch.float16)).mean()

    assert notes_of(Mixed(), LazyH5DataModule(make_h5(x=np.ones((20, 4))), x_key="x", batch_size=4)) == []


@pytest.mark.parametrize(
    "error",
    [
        TypeError("mat1 and mat2 must have the same dtype, but got Double and Float"),
        RuntimeError("a Double meets a Float"),
        RuntimeError("expected scalar type Float but found Half"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_only_errors_of_torch_that_name_the_dtype_are_explained(error):
    assert not explain_dtype_error(error, {("x_dtype", "x"): np.dtype("f8")})
    assert not hasattr(error, "__notes__")
