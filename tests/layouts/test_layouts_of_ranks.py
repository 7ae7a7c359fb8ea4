"""Every layout, by every data module, on two real ranks: the samples of both are right, and none comes twice."""

import pytest
from lightning_models import Recorder, quiet_trainer
from processes import run_ranks, values
from projects import PROJECTS
from test_layouts import MODULES, assert_sample, data_module


class Looker(Recorder):
    """Looks at the values of each sample that it is trained on."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def training_step(self, batch, batch_idx):
        for place, number in enumerate(batch["index"].tolist()):
            assert_sample(batch, place, self.samples[number])
        return super().training_step(batch, batch_idx)


def run(rank, layouts, kind):
    """Train on one layout after the other; return for each the number of steps, and the samples of each epoch."""
    seen = {}
    for name, layout in layouts.items():
        model, trainer = Looker(layout.samples), quiet_trainer(devices=2, strategy="ddp")
        try:
            trainer.fit(model, datamodule=data_module(kind, layout))
        except Exception as error:
            error.add_note(f"with the layout {name}")
            raise
        seen[name] = trainer.global_step, model.train_rows
    return seen


@pytest.mark.wide
@pytest.mark.parametrize("kind", MODULES)
def test_two_ranks_share_the_samples_of_each_layout(kind, tmp_path):
    layouts = {}
    for name, write in PROJECTS.items():
        (tmp_path / name).mkdir()
        layouts[name] = write(tmp_path / name)
    ranks = values(run_ranks(run, 2, tmp_path / "logs", layouts, kind))
    for name, layout in layouts.items():
        for epoch in range(2):
            (steps, mine), (other_steps, other) = ((rank[name][0], rank[name][1][epoch]) for rank in ranks)
            assert steps == other_steps > 0, name
            both = mine + other
            assert len(set(both)) == len(both) >= len(layout.samples) - 1, name
            assert {*both} <= {*range(len(layout.samples))}, name
