"""Check what a release needs beyond passing tests: `python .ci/ready_to_release.py v0.2.0`.

Prints each fault and exits with 1 if there is one. CONTRIBUTING.md explains how to mend them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
URLS = ("Changelog", "Documentation", "Issues", "Source")


def faults(root: Path, tag: str) -> list[str]:
    """Return what is wrong with a release of the repository in `root` under a tag."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.search(r'__version__ = "(.*)"', (root / "lightning_h5" / "_version.py").read_text(encoding="utf-8"))[1]
    problems = []
    if tag != f"v{version}":
        problems.append(f"The tag is {tag!r}, and lightning_h5/_version.py requires 'v{version}'.")
    urls = project.get("urls", {})
    if missing := [name for name in URLS if not urls.get(name, "").startswith("https://")]:
        problems.append(f"[project.urls] in pyproject.toml needs an https:// address for {', '.join(missing)}.")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if not re.search(r"^repository-code: .*https://", citation, flags=re.M):
        problems.append("CITATION.cff has no repository-code.")
    return problems + _faults_of_changelog(root, version, citation) + _faults_of_readme(root, project)


def _faults_of_changelog(root: Path, version: str, citation: str) -> list[str]:
    sections = dict(
        re.findall(
            r"^## \[(.*?)\](.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M | re.S
        )
    )
    problems = []
    if sections.get("Unreleased", "").strip():
        problems.append(f"CHANGELOG.md has changes under [Unreleased]. Move them to [{version}].")
    date = re.match(r" - (\d{4}-\d\d-\d\d)\n", sections.get(version, ""))
    if date is None:
        problems.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'.")
    elif not re.search(rf"^date-released: [\"']?{date[1]}[\"']?$", citation, flags=re.M):
        problems.append(f"CITATION.cff has another date than CHANGELOG.md, which states {date[1]} for {version}.")
    return problems


def _faults_of_readme(root: Path, project: dict[str, object]) -> list[str]:
    """Return relative links, which lead nowhere on a package index, unless a plugin makes the readme at build time."""
    readme = project.get("readme")
    if not isinstance(readme, str):
        return []
    links = re.findall(r"\]\(([^)\s]+)\)", (root / readme).read_text(encoding="utf-8"))
    relative = [link for link in links if not link.startswith(("https://", "#"))]
    return [f"{readme} has {len(relative)} relative links, such as {relative[0]!r}."] if relative else []


def main() -> int:
    """Print the faults and return the exit code."""
    problems = faults(ROOT, sys.argv[1])
    sys.stdout.writelines(f"{fault}\n" for fault in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
