"""What a run prints besides its progress: no warnings of our own making, and log lines before the first bar."""

import logging
import warnings

import numpy as np
import pytest
from lightning.pytorch import Callback
from lightning_models import Recorder, quiet_trainer

from lightning_h5 import LazyH5DataModule

ROWS = 60


@pytest.fixture
def path(make_h5):
    return make_h5(x=np.arange(ROWS))


def test_a_run_without_validation_data_does_not_warn_of_an_empty_loader(path):
    model = Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(max_epochs=1).fit(model, datamodule=LazyH5DataModule(path, x_key="x", with_index=True))
    assert [str(warning.message) for warning in caught if "Total length" in str(warning.message)] == []
    assert (sorted(model.train_rows[0]), model.rows["val"]) == ([*range(ROWS)], [])


class Events(Callback):
    """Notes when a progress bar may begin, between the log lines."""

    def __init__(self):
        self.names = []

    def on_sanity_check_start(self, trainer, pl_module):
        self.names.append("bar")

    def on_train_start(self, trainer, pl_module):
        self.names.append("bar")


def test_log_lines_come_before_the_first_progress_bar(path):
    events = Events()
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: events.names.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        datamodule = LazyH5DataModule(path, x_key="x", with_index=True, split=0.5)
        quiet_trainer(max_epochs=1, callbacks=[events]).fit(Recorder(), datamodule=datamodule)
    finally:
        logger.removeHandler(handler)
    places = [place for place, name in enumerate(events.names) if name.startswith("training order")]
    assert len(places) == 1
    assert places[0] < events.names.index("bar")


def test_two_passes_over_a_loader_without_a_trainer_are_two_epochs(path):
    def loader_of(epoch=None):
        datamodule = LazyH5DataModule(path, x_key="x", with_index=True)
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
        if epoch is not None:
            loader.sampler.set_epoch(epoch)
        return loader

    def rows_of(loader):
        return [row for _, rows in loader for row in rows.tolist()]

    loader = loader_of()
    first, second = rows_of(loader), rows_of(loader)
    assert sorted(first) == sorted(second) == [*range(ROWS)]
    assert (first, second) == (rows_of(loader_of(0)), rows_of(loader_of(1)))
    assert first != second
