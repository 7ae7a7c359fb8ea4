"""The files around the package: issue forms, workflows, recipe, citation, and what a release checks."""

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from lightning_h5 import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
CONDA_NAMES = {
    "torch": "pytorch",
    "blosc2": "python-blosc2",
    "matplotlib": "matplotlib-base",
    "nvidia-nvcomp-cu12": "libnvcomp",
}


def load(path):
    """A YAML file; the key ``on`` of a workflow is text, and not the boolean of YAML 1.1."""
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)


# Issues and the citation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bug", "wrong_rows"])
def test_reports_require_the_call_the_file_and_the_versions(name):
    form = load(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    required = {
        item["id"]: item["attributes"]["label"]
        for item in form["body"]
        if item.get("validations", {}).get("required") == "true"
    }
    assert {"call", "inspect", "version"} < set(required)
    assert "lightning-h5 inspect" in required["inspect"]
    assert "lightning-h5 --version" in required["version"]


def test_citation_and_recipe_have_the_version_of_the_package():
    assert load(ROOT / "CITATION.cff")["version"] == __version__
    assert load(ROOT / "recipe" / "recipe.yaml")["context"]["version"] == __version__


# Workflows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_are_given_to_jobs_only(path):
    workflow = load(path)
    assert workflow["permissions"] == {}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all("permissions" in job for job in workflow["jobs"].values())
    lines = re.findall(r"uses: (.*)", path.read_text())
    assert len(lines) == len([step for step in steps if "uses" in step])
    assert [line for line in lines if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_the_workflow_of_ci_makes_what_the_script_of_ci_makes():
    jobs = load(WORKFLOWS / "ci.yml")["jobs"]
    in_script = re.findall(r"^step (.*)$", (ROOT / ".ci" / "run").read_text(), flags=re.M)
    assert jobs["pinned"]["strategy"]["matrix"]["targets"] == in_script
    named = " ".join([*in_script, "test-newest"]).split()
    assert set(named) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))


def test_workflows_try_each_python_that_is_allowed():
    assert load(WORKFLOWS / "ci.yml")["jobs"]["newest"]["strategy"]["matrix"]["python"] == PYTHONS
    assert load(WORKFLOWS / "release.yml")["jobs"]["check"]["strategy"]["matrix"]["python"] == PYTHONS


def test_publishing_waits_for_all_checks_and_an_approval():
    jobs = load(WORKFLOWS / "release.yml")["jobs"]
    assert [jobs[name]["needs"] for name in ("check", "attest", "publish")] == ["build", "check", "attest"]
    assert jobs["publish"]["environment"] == "pypi"
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["attest", "publish"]
    assert all(jobs[name]["if"] == "github.ref_type == 'tag'" for name in ("attest", "publish"))


# A release -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path):
    """A copy of the files that a release looks at, as they have to be for version 1.2.3, and the check."""
    for name in ("pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    urls = "".join(f'{name} = "https://example.org"\n' for name in ("Changelog", "Documentation", "Issues", "Source"))
    change(tmp_path / "pyproject.toml", r"^\[project\.scripts\]", f"[project.urls]\n{urls}\n[project.scripts]")
    change(tmp_path / "CITATION.cff", r"^date-released: .*", 'date-released: "2027-01-02"')
    change(tmp_path / "CITATION.cff", r"\Z", 'repository-code: "https://example.org"\n')
    (tmp_path / "README.md").write_text("[Elsewhere](https://example.org)\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2027-01-02\n\n- New.\n")
    (tmp_path / "lightning_h5").mkdir()
    (tmp_path / "lightning_h5" / "_version.py").write_text('__version__ = "1.2.3"\n')
    faults = runpy.run_path(str(ROOT / ".ci" / "ready_to_release.py"))["faults"]
    return tmp_path, faults


def change(path, pattern, new):
    text, n = re.subn(pattern, new, path.read_text(), count=1, flags=re.M)
    assert n == 1
    path.write_text(text)


def test_a_complete_release_has_no_fault(release):
    root, faults = release
    assert faults(root, "v1.2.3") == []


def test_each_fault_of_a_release_is_named(release):
    root, faults = release
    change(root / "pyproject.toml", r"^Source = .*\n", "")
    change(root / "CITATION.cff", r"^repository-code: .*\n", "")
    change(root / "CITATION.cff", r"2027-01-02", "2027-01-01")
    change(root / "CHANGELOG.md", r"\[Unreleased\]\n", "[Unreleased]\n\n- More.\n")
    (root / "README.md").write_text("![Speed](docs/speed.svg)\n")
    found = faults(root, "v1.2.4")
    named = ["'v1.2.3'", "for Source.", "repository-code", "[Unreleased]", "2027-01-02", "'docs/speed.svg'"]
    assert len(found) == len(named)
    assert all(any(name in fault for fault in found) for name in named)
    change(root / "CHANGELOG.md", r" - 2027-01-02", "")
    assert "CHANGELOG.md has no section '## [1.2.3] - YYYY-MM-DD'." in faults(root, "v1.2.4")


# The recipe for conda ------------------------------------------------------------------------------------------------


def bounds(requirements):
    """The version bounds of requirements, by the name that conda-forge has for the package."""
    found = {}
    for requirement in requirements:
        name, _, versions = re.match(r"([\w-]+)(\[[\w,]+\])?(.*)", requirement.partition(";")[0].strip()).groups()
        found[CONDA_NAMES.get(name.lower(), name.lower())] = set(versions.strip().split(","))
    return found


def test_the_recipe_requires_what_the_project_requires():
    recipe = load(ROOT / "recipe" / "recipe.yaml")
    required = bounds(recipe["requirements"]["run"])
    assert required.pop("python") == {">=${{ python_min }}"}
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    assert required.pop("__linux") == {""}
    assert required == bounds(name for name in PROJECT["dependencies"] if not name.startswith("zlib-into"))
    extras = PROJECT["optional-dependencies"]
    assert bounds(recipe["requirements"]["run_constraints"]) == bounds(
        name for extra, names in extras.items() for name in names if extra != "all"
    )
