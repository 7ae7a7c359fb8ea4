"""Write SKILL.md and llms.txt, which language models read, from the pages and docstrings.

    python docs/llms.py

`make docs` runs this. Text that exists only for SKILL.md is in `_parts/skill.md`; calls come from the gallery and the
README, arguments from the docstring of the data module, promises from the README and errors from the page that lists
them.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMPORT = "from lightning_h5 import LazyH5DataModule\n\n"
ERRORS = "| you wrote | pass |"
SHORT = 60  # letters of a sentence
MAX_LINE = 120


def skill() -> str:
    """Return SKILL.md."""
    text = (DOCS / "_parts" / "skill.md").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)( [\w: ]+)?\}\}", _part, text)


def llms() -> str:
    """Return llms.txt, in the form of llmstxt.org: pages with their descriptions, as on the first page."""
    lines = [
        "# lightning_h5",
        "",
        f"> {_summary()}",
        "",
        "Links are relative to this file.",
        "",
    ]
    lines += [
        "- [SKILL.md](SKILL.md): how to write the right call for a file; begin here."
    ]
    for title, section in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", _read("index.md"), flags=re.M | re.S
    ):
        if pages := re.findall(
            r"^\[(.*?)\]\((.*?)\.md\)\n: (.*)$", section, flags=re.M
        ):
            lines += ["", f"## {title}", ""]
            lines += [
                f"- [{name}]({page}.html): {about}" for name, page, about in pages
            ]
    return "\n".join(lines) + "\n"


def _part(match: re.Match[str]) -> str:
    kind, names = match[1], (match[2] or "").split()
    if kind == "layouts":
        return "\n\n".join(_layout(name) for name in names)
    if kind == "arguments":
        return _arguments(names)
    return {
        "summary": _summary,
        "rows": _rows,
        "promises": _promises,
        "errors": _errors,
    }[kind]()


def _summary() -> str:
    """Return the first paragraph of the README, without links."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", _readme().split("\n\n")[1])


def _rows() -> str:
    return next(
        line
        for line in _blocks(_readme())[0].splitlines()
        if line.startswith("datamodule =")
    )


def _promises() -> str:
    return "\n".join(
        map(_line, re.findall(r"^- \*\*.*?(?=^- |^$)", _readme(), flags=re.M | re.S))
    )


def _layout(name: str) -> str:
    """Return a page of the gallery in short: its title, what is trained on, what a sample is, and its call."""
    text = re.sub(
        r"^```\{.*?^```\n+", "", _read(f"gallery/{name}.md"), flags=re.M | re.S
    )
    title, about = re.match(r"# (.*?)\n\n(.*?)\n\n", text, flags=re.S).groups()
    call = _one_line_each(next(block for block in _blocks(text) if IMPORT in block))
    sample = re.search(r"^## A batch\n\n(.*?\.)(?:\s|$)", text, flags=re.M | re.S)[1]
    return f"**{title}.** {_line(about)} {_line(sample)}\n\n```python\n{call}\n```"


def _one_line_each(source: str) -> str:
    """Return the call of a block with a line for each argument that fits into one."""
    assignment = ast.parse(source).body[1]
    call = assignment.value
    given = [*call.args, *call.keywords]
    lines = [f"    {ast.unparse(argument)},".replace("'", '"') for argument in given]
    for at, argument in enumerate(given):
        if len(lines[at]) > MAX_LINE:
            lines[at] = f"    {ast.get_source_segment(source, argument)},"
    text = "\n".join(
        [
            f"{ast.unparse(assignment.targets[0])} = {ast.unparse(call.func)}(",
            *lines,
            ")",
        ]
    )
    if ast.dump(ast.parse(text).body[0]) != ast.dump(assignment):
        raise ValueError(
            f"this call has other quotes inside, or needs more than a name: {text}"
        )
    return text


def _arguments(names: list[str]) -> str:
    """Return what the docstring of the data module begins with on each argument: as many sentences as follow the name.

    Otherwise it is one, or two if the first is short.
    """
    source = (ROOT / "lightning_h5" / "datamodules" / "lazy.py").read_text(
        encoding="utf-8"
    )
    module = next(
        node
        for node in ast.parse(source).body
        if getattr(node, "name", "") == "LazyH5DataModule"
    )
    docstring = inspect.cleandoc(ast.get_docstring(module))
    about = dict(
        re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|^\S|\Z)", docstring, flags=re.M | re.S)
    )
    lines = []
    for name, _, n in (name.partition(":") for name in names):
        text = _line(about[name]).replace("``", "`")
        sentences = re.split(r"(?<=\.)\s", text)
        most = int(n) if n else 2 if len(sentences[0]) < SHORT else 1
        lines.append(f"- `{name}`: {' '.join(sentences[:most])}")
    return "\n".join(lines)


def _errors() -> str:
    """Return the table of frequent errors from the page that has it."""
    tables = [
        page.read_text(encoding="utf-8").partition(ERRORS)[2]
        for page in sorted(DOCS.glob("*.md"))
    ]
    (table,) = filter(None, tables)
    return ERRORS + table.split("\n\n")[0]


def _line(text: str) -> str:
    return " ".join(text.split())


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)


def _read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def main() -> None:
    """Write both files."""
    (ROOT / "SKILL.md").write_text(skill(), encoding="utf-8")
    (ROOT / "llms.txt").write_text(llms(), encoding="utf-8")


if __name__ == "__main__":
    main()
