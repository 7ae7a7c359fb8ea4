"""The notebook `examples/tour.ipynb` as a page, with stored outputs.

    python docs/tour.py

executes the notebook, which needs the groups and extras of the tests, and stores the text and images of its cells in
`docs/_parts/tour.json` and `docs/_static/tour`. The documentation build makes the page from the notebook and these
files; it executes nothing.
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOK = DOCS.parent / "examples" / "tour.ipynb"
OUTPUTS = DOCS / "_parts" / "tour.json"
IMAGES = DOCS / "_static" / "tour"


def page(notebook: dict[str, Any], outputs: dict[str, Any]) -> str:
    """Return the notebook as Markdown, with the outputs of each code cell below it."""
    lines: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            entries = ["```{index} ! notebook, ! Jupyter", "```", ""]
            lines += [source, "", *([] if lines else entries)]
            continue
        lines += ["```python", source, "```", ""]
        for output in outputs[cell["id"]]["outputs"]:
            if "text" in output:
                lines += ["```text", output["text"].rstrip("\n"), "```", ""]
            else:
                lines += [
                    f"```{{image}} _static/tour/{output['image']}",
                    f":alt: {output['alt']}",
                    ":class: output",
                    "```",
                    "",
                ]
    return "\n".join(lines)


def stored_outputs(executed: dict[str, Any]) -> dict[str, Any]:
    """Return the source, text and images of each code cell, without the notices of libraries; write images to files."""
    outputs_by_cell: dict[str, Any] = {}
    heading = ""
    for cell in executed["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = source.splitlines()[0].lstrip("# ")
            continue
        outputs: list[dict[str, str]] = []
        for output in cell["outputs"]:
            if output.get("name") == "stdout":
                outputs.append({"text": "".join(output["text"])})
            elif "image/png" in output.get("data", {}):
                name = f"{cell['id']}.png"
                image = base64.b64decode("".join(output["data"]["image/png"]))
                (IMAGES / name).write_bytes(image)
                alt = f"Output of the cell above: {heading.lower()}"
                outputs.append({"image": name, "alt": alt})
        outputs_by_cell[cell["id"]] = {"source": source, "outputs": outputs}
    return outputs_by_cell


def execute() -> None:
    """Execute the notebook in a temporary folder, and store its outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=150, kernel_name="python3", resources=resources
        ).execute()
    OUTPUTS.write_text(
        json.dumps(stored_outputs(notebook), indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    execute()
