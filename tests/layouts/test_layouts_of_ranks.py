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
    """Train on one layout after the other; return the samples of each epoch of each layout."""
    seen = {}
    for name, layout in layouts.items():
        model = Looker(layout.samples)
        try:
            quiet_trainer(devices=2, strategy="ddp").fit(model, datamodule=data_module(kind, layout))
        except Exception as error:
            error.add_note(f"with the layout {name}")
            raise
        seen[name] = model.train_rows
    return seen


@pytest.mark.wide
@pytest.mark.parametrize("kind", MODULES)
def test_two_ranks_share_the_samples_of_each_layout(kind, tmp_path):
    layouts = {}
    for name, write in PROJECTS.items():
        (tmp_path / name).mkdir()
        layouts[name] = write(tmp_path / name)
    ranks = values(run_ranks(run, 2, tmp_path / "logs", layouts, kind, timeout=300))
    for name, layout in layouts.items():
        for epoch in range(2):
            mine, other = (rank[name][epoch] for rank in ranks)
            assert -(-len(mine) // 4) == -(-len(other) // 4) > 0, name  # steps
            both = mine + other
            assert len(set(both)) == len(both) >= len(layout.samples) - 1, name
            assert {*both} <= {*range(len(layout.samples))}, name
