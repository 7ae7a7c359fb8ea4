"""The tables and charts of the benchmark page, made of the stored results.

    python examples/benchmarks/page.py [docs]

reads `docs/_parts/NAME.json`, and writes `docs/_parts/NAME.md` and `docs/_static/NAME.svg`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import setting_of
from dots import Chart, draw, medians

OURS, PLAIN, LIMITS = "lightning_h5", "plain h5py", ("bare", "index_select", "decoding and")
AS_STORED = {
    "plain h5py": "plain h5py",
    "SPDL with h5py": "SPDL with h5py",
    "insitubatch": "insitubatch",
    "lightning_h5": "lightning_h5",
    "lightning_h5, rows fit in memory": "lightning_h5, cached",
}
CHARTS = {
    "benchmarks": Chart(
        unit="rows per second",
        cases={
            "images-gzip-32": "Images, gzip, 32 rows per chunk",
            "signals-gzip-32": "Signals, shuffle and gzip, 32 rows per chunk",
            "images-contiguous": "Images, contiguous",
        },
        labels=AS_STORED,
    ),
    "converted": Chart(
        unit="rows per second",
        cases={"images": "Images", "signals": "Signals"},
        labels={
            "plain h5py": "plain h5py, as stored",
            "insitubatch*": "insitubatch*",
            "litdata*": "litdata*",
            "litdata with arrays*": "litdata with arrays*",
            "lightning_h5, as stored": "lightning_h5, as stored",
            "lightning_h5, decoded store": "lightning_h5, decoded",
            "lightning_h5, repacked, contiguous, mmap": "lightning_h5, repacked",
        },
        ours=("lightning_h5, as stored",),
    ),
    "windows": Chart(
        unit="windows per second",
        cases={
            "images": "Episodes, windows of 4 images",
            "trajectories": "Trajectories, windows of 5 fields",
            "eeg": "EEG recordings, windows of 200 steps",
            "patches": "Volumes, patches of 32x64x64",
            "contiguous": "Contiguous recordings, windows of 50",
            "sensors": "One recording, windows of 16, stride 1",
        },
        labels=AS_STORED,
    ),
    "cells": Chart(
        unit="cells per second",
        cases={"cells": "Cells of 2,000 genes, 5 % filled"},
        labels={
            "plain h5py": "plain h5py",
            "SPDL with h5py": "SPDL with h5py",
            "anndata": "anndata, backed",
            "scDataset": "scDataset",
            "annbatch*, dense": "annbatch*, dense",
            "annbatch*, CSR": "annbatch*, CSR",
            "lightning_h5, dense": "lightning_h5, dense",
            "lightning_h5, CSR": "lightning_h5, CSR",
        },
        ours=("lightning_h5, dense", "lightning_h5, CSR"),
    ),
}
NUMBERS = dict(enumerate(("No", "One", "Two", "Three", "Four", "Five")))
SCRIPTS = {"benchmarks": "compressed"} | {name: name for name in ("converted", "windows", "cells")}


def page(name: str, result: Mapping[str, Any]) -> str:
    """Return the tables of a question, folded, below a sentence about where others are faster."""
    parts = [case(each) for each in result["results"]]
    skipped = "".join(f" {peer} is missing." for peer in result["skipped"])
    about = result["environment"]
    rounds = f"{result['rounds']} round{'s'[: result['rounds'] - 1]}"
    setting = (
        f"{setting_of(about, SCRIPTS[name])}: batches of {result['batch_size']}, {rounds} in one run, medians, files "
        f"in the page cache. Versions: {versions(about)}.{skipped}"
    )
    fold = ["<details><summary>All figures</summary>", *parts, setting, "</details>"]
    return "\n\n".join([losses(CHARTS[name], result), *fold]) + "\n"


def versions(about: Mapping[str, Any]) -> str:
    """Return the versions of an environment as a sentence's part."""
    return ", ".join(f"{name} {of}" for name, of in about.items() if name not in ("date", "cpus", "torch_threads"))


def losses(chart: Chart, result: Mapping[str, Any]) -> str:
    """Return a sentence about the charted cases in which other loaders are faster."""
    found = []
    for each in result["results"]:
        rates = medians(each) if each["case"] in chart.cases else {}
        for team in rates.keys() & chart.labels.keys():
            alike = [ours for ours in chart.ours if ours.split()[-1] == team.split()[-1]] or chart.ours
            ours = min(alike, key=lambda ours: rates[ours])
            if not team.startswith(OURS) and rates[team] > rates[ours]:
                times = ratio(rates[team] / rates[ours])
                rival, where = chart.labels[ours], chart.cases[each["case"]]
                found.append(f"{chart.labels[team]} is {times} times as fast as {rival} ({where})")
    return f"Where others are faster: {'; '.join(sorted(found)) or 'nowhere'}."


def case(result: Mapping[str, Any]) -> str:
    """Return the table of a case."""
    rates = {each["name"]: statistics.median(each["rows_per_second"]) for each in result["contenders"]}
    plain = max(rate for name, rate in rates.items() if name.startswith(PLAIN))
    is_converted = "bytes" in result["contenders"][0]
    lines = []
    for each in result["contenders"]:
        name = f"**{each['name']}**" if each["name"].startswith(OURS) else each["name"].replace("*", "\\*")
        cells = [name, f"{rates[each['name']]:,.0f}", ratio(rates[each["name"]] / plain)]
        if is_converted:
            seconds = each["convert_seconds"]
            cells += [f"{seconds:,.1f}" if seconds else "-", f"{each['bytes'] / 2**20:,.0f}"]
        lines.append(cells)
    more = ["convert, s", "MiB"] if is_converted else []
    title = f"**{result['rows_are'][:1].upper()}{result['rows_are'][1:]}**, {result['title']}"
    if "stored_bytes" in result:
        title += f": {result['stored_bytes'] / 2**20:,.0f} MiB in the file"
    if result.get("chunks"):
        title += f", chunks ({', '.join(map(str, result['chunks']))}), {result['compression_ratio']:.2f} times smaller"
    return f"{title}.\n\n{table(['', 'per second', 'times plain h5py', *more], lines)}"


def cost(result: Mapping[str, Any]) -> str:
    """Return the headline and its table."""
    found = result["results"]
    lines = [
        [
            each["title"],
            f"{statistics.median(each['step_ms']['held']):.0f}",
            *(
                cell
                for way in ("stored", "decoded")
                for cell in (speed(each, way), f"{100 * each[f'{way}_cpu_share']:.1f} %")
            ),
        ]
        for each in found
    ]
    head = ["training", "step, ms", "as stored", "processor time", "decoded store", "processor time"]
    least = [f"{100 * min(each[f'{way}_share'] for each in found):.1f} %" for way in ("stored", "decoded")]
    costly = [100 * max(each[f"{way}_cpu_share"] for each in found) for way in ("stored", "decoded")]
    sentence = (
        f"**{NUMBERS[len(found)]} models that train on the processor reach {least[0]} or more of the speed that they "
        f"have on batches in memory, and {least[1]} or more once decoded chunks are kept on the disk.** The loader "
        "decodes on the cores that the model computes on: "
        f"that takes up to {costly[0]:.1f} and {costly[1]:.1f} % of their time."
    )
    about, rounds = result["environment"], min(len(each["step_ms"]["held"]) for each in found)
    setting = (
        f"{setting_of(about, 'loader_cost')}: medians of {rounds} rounds, in brackets the lowest and the highest; "
        f"torch {about['torch']}, Lightning {about['lightning']}. Files are gzip, and a quarter of the rows fits into "
        "memory. Batches with and without a loader take turns step by step. Processor time is that of a batch without "
        "a model, over that of a step."
    )
    return "\n\n".join([sentence, table(head, lines), setting]) + "\n"


def speed(result: Mapping[str, Any], way: str) -> str:
    """Return a training's speed, of that without a loader."""
    steps = result["step_ms"]
    shares = [100 * held / step for held, step in zip(steps["held"], steps[way], strict=True)]
    return f"{100 * result[f'{way}_share']:.1f} % ({min(shares):.0f} to {max(shares):.0f})"


def dlio(result: Mapping[str, Any]) -> str:
    """Return the sentence about DLIO."""
    busy = {each["name"]: statistics.median(each["au"]) for each in result["results"]}
    others = [share for name, share in busy.items() if name != OURS]
    about = result["environment"]
    return (
        f"In DLIO {about['dlio-benchmark']}, the benchmark of MLPerf Storage, accelerators are simulated: a batch is "
        f"{result['step_ms']:.0f} ms of sleep. They are busy for {busy[OURS]:.0f} % of the time with this package, and "
        f"for {max(others):.0f} % with DLIO's own HDF5 reader, which opens the file for each sample (images of 64 KiB, "
        f"gzip, one per chunk, batches of 64). {setting_of(about, 'dlio')}.\n"
    )


def archive(result: Mapping[str, Any]) -> str:
    """Return the line about loaders that are measured no more."""
    about, found = result["environment"], []
    for each in result["results"]:
        ways = each["ways"]
        rates = {peer: max(ways[way]["rows_per_second"] for way in ways if way.startswith(peer)) for peer in ARCHIVED}
        ours = ways["lightning_h5, repacked, contiguous, mmap"]["rows_per_second"]
        kind = each["rows_are"].partition(" ")[0]
        peers = ", ".join(f"{name} {rates[peer]:,.0f}" for peer, name in ARCHIVED.items())
        found.append(f"{kind}: {peers}, lightning_h5 repacked {ours:,.0f}")
    names = " and ".join(f"{name} {about[peer]}" for peer, name in ARCHIVED.items())
    return (
        f"Archive: {names} have had no release since 2023 and 2025. Last measured on {about['date']} by "
        "`examples/benchmarks/converted.py` of version 0.2.0, rows per second from their own copies: "
        f"{'; '.join(found)}.\n"
    )


ARCHIVED = {"ffcv": "FFCV", "mosaicml-streaming": "mosaicml-streaming"}


def ratio(value: float) -> str:
    """Return two digits that mean something."""
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def texts(parts: Path) -> dict[str, str]:
    """Return all texts and charts by file name, from the results in a folder."""
    stored = {path.stem: json.loads(path.read_text()) for path in parts.glob("*.json")}
    found = {"loader_cost.md": cost(stored["loader_cost"]), "archive.md": archive(stored["archive"])}
    found["dlio.md"] = dlio(stored["dlio"])
    for name, chart in CHARTS.items():
        found |= {f"{name}.md": page(name, stored[name]), f"{name}.svg": draw(chart, stored[name])}
    return found


if __name__ == "__main__":
    docs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs"
    for name, text in texts(docs / "_parts").items():
        (docs / ("_static" if name.endswith(".svg") else "_parts") / name).write_text(text)
