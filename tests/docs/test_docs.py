"""The documentation is true: its code runs, its YAML names existing arguments, its lists are complete."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import lightning_h5

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_h5"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# The pages keep Lightning's default logger, about which it says something.
pytestmark = pytest.mark.filterwarnings("ignore:Starting from v1.9.0, .tensorboardX. has been removed:UserWarning")


class Block(NamedTuple):
    """A fenced block of a page: its language, the page's line it begins at, its text without indentation."""

    language: str
    line: int
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """Fenced blocks of a language, also those inside lists."""
    found: list[Block] = []
    fence = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if fence is None:
            if match := re.match(r"( *)(```+)(\S*)", line):
                fence, inside = match, []
        elif line.strip() == fence[2]:
            found.append(Block(fence[3], number - len(inside), "\n".join(inside) + "\n"))
            fence = None
        else:
            inside.append(line.removeprefix(fence[1]))
    assert fence is None, f"{page.name}: the block {fence[0]!r} does not end"
    return [block for block in found if block.language == language]


def run_python(page: Path, *more: str) -> None:
    """Runs a page's Python, one block after the other in one namespace, with the page's own line numbers.

    Blocks of more languages, such as "py", are run at their places, too.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = [block for language in ("python", *more) for block in blocks(page, language)]
    for block in sorted(found, key=lambda block: block.line):
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, page.name, "exec"), namespace)


def page_ids(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=[page.stem for page in pages])


@pytest.mark.wide
@page_ids([page for page in PAGES if blocks(page, "python")])
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page)


@pytest.mark.wide
@pytest.mark.parametrize(("page", "needed"), [("transforms", "torchvision"), ("tuning", "wandb")])
def test_code_for_other_packages_runs(page: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    run_python(ROOT / "docs" / f"{page}.md", "py")


def test_code_is_found_in_readme_and_docs() -> None:
    """A change to the pages or to `blocks` cannot empty the test above in silence."""
    assert {page.name for page in PAGES if blocks(page, "python")} >= {
        "README.md",
        "architecture.md",
        "concepts.md",
        "index.md",
        "quickstart.md",
        "troubleshooting.md",
    }


@page_ids([page for page in PAGES if blocks(page, "yaml")])
def test_yaml_names_existing_arguments(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data alone is completed by a model; an unknown key or a wrong type makes the parser exit."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    import lightning_h5.datamodules  # their names without a module are known once they are imported

    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):
        config = yaml.safe_load(block.text)
        assert "data" in config, f"{page.name}, line {block.line}: YAML that is no configuration"
        config.setdefault("seed_everything", 1)
        config.setdefault("model", {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"})
        cli = LightningCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_defaults={"logger": False},
            save_config_callback=None,
            run=False,
            args=config,
        )
        named = config["data"]["class_path"].rpartition(".")[2]
        assert type(cli.datamodule) is getattr(lightning_h5, named)


def test_readme_yaml_does_what_its_code_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the file that the code makes."""
    pytest.importorskip("jsonargparse")
    from lightning_h5.cli import main

    monkeypatch.chdir(tmp_path)
    readme = ROOT / "README.md"
    (python, *_), (config,) = blocks(readme, "python"), blocks(readme, "yaml")
    exec(compile(python.text.split("datamodule =")[0], readme.name, "exec"), {})
    Path("train.yaml").write_text(config.text, encoding="utf-8")
    main(["fit", "--config", "train.yaml", "--trainer.fast_dev_run=true"])


def test_readme_is_short() -> None:
    first, *_ = blocks(ROOT / "README.md", "python")
    assert len([line for line in first.text.splitlines() if line]) <= 15
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_readme_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    for target in targets:
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            text = (ROOT / path).read_text(encoding="utf-8")
            headings = {
                re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", text, flags=re.M)
            }
            assert not anchor or anchor in headings, f"{target} is not a heading of {path}"


def test_install_page_has_every_extra_and_supported_version() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, flags=re.M)) == sorted(project["optional-dependencies"])
    pythons = [name.split()[-1] for name in project["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in page
    for name, title in {"torch": "PyTorch", "h5py": "h5py", "numpy": "NumPy"}.items():
        (bound,) = [need.removeprefix(f"{name}>=") for need in project["dependencies"] if need.startswith(f"{name}>=")]
        assert f"| {title} | {bound} or newer" in page


def test_architecture_has_a_paragraph_for_every_folder_and_names_modules_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    opening = {
        name for line in re.findall(r"^\*\*(.*?)\*\*", page, flags=re.M) for name in re.findall(r"`(\w+)/`", line)
    }
    opening |= set(re.findall(r"\*\*`(\w+)/`\*\*", page))
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/__init__.py")}
    assert opening == folders
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page))
    assert [name for name in sorted(named) if not any((base / name).exists() for base in (PACKAGE, ROOT))] == []


def test_reference_has_every_public_name() -> None:
    pages = [page for page in (ROOT / "docs" / "reference").glob("*.md") if page.stem != "extending"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    shown = re.findall(r"^\.\. (?:auto(?:class|function|exception)|data):: (\w+)$", text, flags=re.M)
    for summary in re.findall(r"^\.\. autosummary::\n(.*?)^```$", text, flags=re.M | re.S):
        shown += re.findall(r"^   (\w+)$", summary, flags=re.M)
    assert sorted(shown) == sorted(lightning_h5.__all__)


def test_docs_do_not_promise_what_is_not_there() -> None:
    """Modules and verbs that are planned are not documented before they exist."""
    planned = ["RankCached", "CombinedHDF5", "lightning_h5 inspect", "lightning_h5 check", "lightning_h5 bench"]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not [name for name in planned if name in text and not _exists(name)], page.name


def _exists(name: str) -> bool:
    from lightning_h5.cli.verbs import VERBS

    verb = name.removeprefix("lightning_h5 ")
    return verb in VERBS or any(public.startswith(name) for public in lightning_h5.__all__)


def benchmark(name):
    own = f"benchmark_{name}"  # `mixing` is a module of the tests, too
    spec = importlib.util.spec_from_file_location(own, ROOT / "examples" / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_table_of_label_entropies_is_what_the_order_gives():
    mixing = benchmark("mixing")
    found = mixing.table(mixing.Rows(n_rows=20_000, per_chunk=32, n_bytes=12_288))
    assert found == (ROOT / "docs" / "_parts" / "entropy.md").read_text()


def test_the_tests_that_contributing_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
