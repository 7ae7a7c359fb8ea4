"""How many samples a second come from the files of research communities, beside the loaders that they wrote?

    python examples/benchmarks/gallery.py [robomimic ...] [--rounds 3] [--json FILE] [--pages FOLDER]

For each community, writes files as its programs do, and rebuilds its loader from its description: it opens, slices and
lists as theirs does. First, samples of theirs are compared with those of the data module, value by value. Then
shuffled epochs take turns: theirs in a `DataLoader` with 0 and with 2 workers, timed for two seconds after their first
batches, and ours as on its page: the first epoch of a new data module, and the second, both whole. No split is made;
decoded rows have 32 MiB, so that they do not fit and are decoded again in each epoch. Files are in the page cache.
Ratios are of medians, to the faster of theirs. An epoch takes a second or less, so that in the first one, much of the
time goes into memory that is used for the first time; the summary has the second, which is what long epochs are like.

`--pages docs/_parts/gallery` writes the tables of the documentation from the results.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from common import environment, setting_of, write_json
from communities import COMMUNITIES, Community
from torch.utils.data import DataLoader

import lightning_h5

SECONDS = 2.0  # that a loader of theirs is timed for
N_WARM = 3  # batches before
MEMORY = "32 MiB"
FIRST, OURS = "lightning_h5, first epoch", "lightning_h5"


def run(community: Community, n_rounds: int, size: float = 1.0) -> dict[str, Any]:
    """Compare samples, then measure."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        community.write(Path(folder), size)
        check(community)
        rates: dict[str, list[float]] = {}
        for _ in range(n_rounds):
            for num_workers in (0, 2):
                loader = community.their_loader(num_workers)
                rates.setdefault(f"{num_workers} workers", []).append(their_rate(loader, community.batch_size))
            first, later, n = our_rates(community)
            rates.setdefault(FIRST, []).append(first)
            rates.setdefault(OURS, []).append(later)
        n_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    found = {name: median(each) for name, each in rates.items()}
    theirs = max(rate for name, rate in found.items() if name not in (FIRST, OURS))
    return {
        "title": community.title,
        "loader": community.loader,
        "sample": community.sample,
        "n_samples": n,
        "batch_size": community.batch_size,
        "stored_bytes": n_bytes,
        "rates": found,
        "ratio": found[OURS] / theirs,
    }


def check(community: Community, most: int = 200) -> None:
    """Compare samples of theirs with ours, in the order of the files."""
    module = data_module(community, shuffle=False)
    module.setup("fit")
    for number, (theirs, ours) in enumerate(community.pairs(module.datasets["train"], most)):
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            is_narrowed = (np.asarray(one).dtype, np.asarray(other).dtype) == (np.float64, np.float32)
            expected = np.asarray(one, np.float32) if is_narrowed else one  # x_dtype="auto"
            np.testing.assert_array_equal(other, expected, err_msg=f"pair {number}")
    module.teardown("fit")


def data_module(community: Community, **more: Any) -> Any:
    """Return the data module of the page, without its split."""
    make = getattr(lightning_h5, community.data_module)
    return make(**{**community.options, "split": None, "batch_size": community.batch_size, **more})


def their_rate(loader: DataLoader[Any], batch_size: int) -> float:
    """Return samples a second after the first batches, over some seconds or an epoch.

    A last batch that is not full counts as a full one, in their favor.
    """
    batches, n = iter(loader), 0
    for _ in range(min(N_WARM, len(loader) // 2)):
        next(batches)
    began = perf_counter()
    for _ in batches:
        n += batch_size
        if perf_counter() - began > SECONDS:
            break
    return n / (perf_counter() - began)


def our_rates(community: Community) -> tuple[float, float, int]:
    """Return samples a second of the first and of the second epoch, and the samples of each."""
    module = data_module(community, shuffle={"buffer": MEMORY}, files={"cache_bytes": MEMORY})
    module.setup("fit")
    loader, n, rates = module.train_dataloader(), len(module.datasets["train"]), []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        began = perf_counter()
        for _ in loader:
            pass
        rates.append(n / (perf_counter() - began))
    module.teardown("fit")
    return rates[0], rates[1], n


# Pages ---------------------------------------------------------------------------------------------------------------


def pages(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts that the documentation includes, by file name."""
    about = results["environment"]
    found = {f"{name}.md": _page(result, about) for name, result in results["results"].items()}
    lines = ["| | a sample is one of the | samples/s, theirs | here | ratio |", "|---|---|---:|---:|---:|"]
    for name, result in results["results"].items():
        theirs, ours = _rates(result)
        title = f"[{result['title']}]({name}.md)"
        lines.append(f"| {title} | {result['sample']} | {theirs:,.0f} | {ours:,.0f} | {_ratio(result['ratio'])} |")
    found["all.md"] = "\n".join([*lines, "", f"{setting_of(about, 'gallery')}."]) + "\n"
    return found


def _page(result: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    lines = ["| | samples/s | ratio |", "|---|---:|---:|"]
    for name, rate in result["rates"].items():
        ours = {FIRST: "**this package**, first epoch", OURS: "**this package**, later epochs"}
        title = ours.get(name) or f"{result['loader']}, {name}"
        lines.append(f"| {title} | {rate:,.0f} | {_ratio(rate / _rates(result)[0])} |")
    size = f"{result['n_samples']:,} {result['sample']} in {result['stored_bytes'] / 2**20:,.0f} MiB"
    return "\n".join([*lines, "", f"{size}, batches of {result['batch_size']}. {setting_of(about, 'gallery')}."]) + "\n"


def _rates(result: Mapping[str, Any]) -> tuple[float, float]:
    rates = dict(result["rates"])
    ours = rates.pop(OURS)
    rates.pop(FIRST)
    return max(rates.values()), ours


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def main() -> None:
    """Measure the communities."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMUNITIES)}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=float, default=1.0, help="of the files")
    parser.add_argument("--json", type=Path, help="results are added to those that are in it")
    parser.add_argument("--pages", type=Path, help="folder for the documentation's tables, made of the JSON file")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for name in given.names or COMMUNITIES:
        result = run(COMMUNITIES[name], given.rounds, given.size)
        print(f"\n{result['title']}: {result['n_samples']:,} {result['sample']}")
        for which, rate in result["rates"].items():
            print(f"  {which:26} {rate:12,.0f} samples/s")
        print(f"  {'ratio':26} {result['ratio']:12.1f}", flush=True)
        if given.json:
            written = json.loads(given.json.read_text()) if given.json.exists() else {"results": {}}
            written["environment"] = environment()
            results = written["results"] | {name: result}
            written["results"] = {each: results[each] for each in COMMUNITIES if each in results}
            write_json(given.json, written)
    if given.pages and given.json:
        given.pages.mkdir(parents=True, exist_ok=True)
        for name, text in pages(json.loads(given.json.read_text())).items():
            (given.pages / name).write_text(text)


if __name__ == "__main__":
    main()
