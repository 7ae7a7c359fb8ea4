"""``calculate_optimal_batch_size``: what Lightning's finder finds, for a model of any kind."""

import pytest
import torch

from lightning_h5 import H5ValueError, calculate_optimal_batch_size
from lightning_h5.datamodules.tuning import largest_batch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, on workers and lengths


class Limited(torch.nn.Module):
    """Runs out of memory above so many rows."""

    def __init__(self, most):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 1), torch.nn.BatchNorm1d(1))
        self.most, self.seen = most, []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return {"logits": (self.layers(x),)}


@pytest.mark.wide
@pytest.mark.parametrize(("most_rows", "expected"), [(9, 8), (16, 16), (1000, 64)])
def test_the_largest_batch_that_has_room_is_found_and_the_model_stays_as_it_is(most_rows, expected):
    model = Limited(most_rows)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert largest_batch(model, (2, 3), "cpu", 64) == expected
    assert max(model.seen) <= 64
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_memory_is_no_limit_without_an_accelerator():
    assert calculate_optimal_batch_size(Limited(1), (2, 3), "cpu") == 32
    with pytest.raises(H5ValueError, match="input_shape"):
        calculate_optimal_batch_size(Limited(1), (2, 0), "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_margin_is_left_on_a_gpu():
    assert calculate_optimal_batch_size(Limited(100), (2, 3), "cuda") == 51
