"""The gallery: its calls give the samples of the communities' own loaders, and its figures are those measured."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from benchmark_modules import load_benchmark

import lightning_h5

# Two communities' own ways of loading need these.
pytest.importorskip("pandas")
pytest.importorskip("scipy")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
gallery = load_benchmark("gallery")
COMMUNITIES = gallery.COMMUNITIES

SMALL = 0.03
ALL = pytest.mark.parametrize("name", COMMUNITIES)
MAX_LINES = 100


@pytest.fixture
def files(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    COMMUNITIES[name].write(tmp_path, SMALL)


def blocks_of(name, language):
    text = (DOCS / "gallery" / f"{name}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


@ALL
@pytest.mark.usefixtures("files")
def test_samples_are_those_of_the_communitys_own_loader(name):
    gallery.check(COMMUNITIES[name], most=100_000)


@ALL
@pytest.mark.usefixtures("files")
def test_the_code_of_the_page_runs_and_is_the_call_that_was_measured(name):
    namespace = {}
    for block in blocks_of(name, "python"):
        exec(compile(block, f"{name}.md", "exec"), namespace)
    of_page = namespace["datamodule"]
    community = COMMUNITIES[name]
    measured = getattr(lightning_h5, community.data_module)(**community.options)
    assert type(of_page) is type(measured)
    assert of_page.hparams == measured.hparams
    (config,) = blocks_of(name, "yaml")
    of_yaml = yaml.safe_load(config)["data"]
    assert of_yaml["class_path"] == community.data_module
    assert getattr(lightning_h5, community.data_module)(**of_yaml["init_args"]).hparams == measured.hparams


@ALL
@pytest.mark.wide
@pytest.mark.usefixtures("files")
def test_the_yaml_of_the_page_trains(name):
    pytest.importorskip("jsonargparse")
    from lightning_h5.cli import main

    model = {"class_path": "anything_model.AnyModel"}
    Path("anything_model.py").write_text(ANY_MODEL)
    (config,) = blocks_of(name, "yaml")
    Path("train.yaml").write_text(yaml.safe_dump({**yaml.safe_load(config), "model": model, "seed_everything": 1}))
    sys.path.insert(0, ".")
    try:
        main(["fit", "--config", "train.yaml", "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"])
    finally:
        sys.path.remove(".")
        sys.modules.pop("anything_model", None)


ANY_MODEL = '''
import torch
from lightning.pytorch import LightningModule


class AnyModel(LightningModule):
    """Takes any batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return self.weight * 1.0

    def validation_step(self, batch):
        pass

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
'''


def test_each_community_has_a_page_of_one_screen_that_the_gallery_lists():
    pages = {page.stem for page in (DOCS / "gallery").glob("*.md")} - {"index"}
    assert pages == set(COMMUNITIES)
    listed = re.search(r"^```\{toctree\}\n(.*?)^```$", (DOCS / "gallery" / "index.md").read_text(), flags=re.M | re.S)
    assert [line for line in listed[1].split() if not line.startswith(":") and not line.isdigit()] == list(COMMUNITIES)
    for name, community in COMMUNITIES.items():
        lines = (DOCS / "gallery" / f"{name}.md").read_text().splitlines()
        assert lines[0] == f"# {community.title}"
        assert len(lines) <= MAX_LINES, name


def test_the_figures_of_the_pages_are_those_that_were_measured():
    folder = DOCS / "_parts" / "gallery"
    measured = json.loads((DOCS / "_parts" / "gallery.json").read_text())
    assert list(measured["results"]) == list(COMMUNITIES)
    expected = gallery.pages(measured)
    assert {path.name: path.read_text() for path in folder.glob("*.md")} == expected
