"""What the order of an epoch costs where there are very many rows: time to open, memory, time to any batch.

    python examples/benchmarks/plan.py

No file is read: a plan is a pure function of numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tracemalloc
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lightning_h5.order import BlockTable, EpochPlan, Mode, OrderParameters, PlanSampler

N_LOOKS = 2000


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**9)
    parser.add_argument("--blocks", type=int, default=10**6)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--world-size", type=int, default=64, help="also the number of streams of 'chunks'")
    parser.add_argument("--window", type=int, default=512, help="blocks that 'chunks' mixes at a time")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    sizes = np.full(options.blocks, options.rows // options.blocks)
    sizes[: options.rows % options.blocks] += 1
    print(f"{options.rows:,} rows in {options.blocks:,} blocks, batches of {options.batch_size} on each of", end=" ")
    print(f"{options.world_size} ranks, as many streams, windows of {options.window} blocks;", end=" ")
    print(f"{date.today()}, Python {platform.python_version()}, NumPy {np.__version__}\n")
    print(
        f"{'order':>8} {'open':>10} {'memory':>10} {'any batch':>12} {'slowest':>10} {'next one':>10} {'slowest':>10}"
    )
    modes: tuple[Mode, ...] = ("global", "chunks", "none")
    orders = [
        OrderParameters(mode=mode, batch_size=options.batch_size, streams=options.world_size, window=options.window)
        for mode in modes
    ]
    figures = {order.mode: measure(order, sizes, options.world_size) for order in orders}
    for mode, of in figures.items():
        print(
            f"{mode:>8} {of['open_s']:>8.3f} s {of['memory_mib']:>6.1f} MiB {of['batch_ms']:>9.3f} ms "
            f"{of['slowest_ms']:>7.3f} ms {of['next_ms']:>7.3f} ms {of['slowest_next_ms']:>7.3f} ms"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def measure(order: OrderParameters, sizes: Any, world_size: int) -> dict[str, float]:
    """Figures of one order. Time and memory are taken apart: looking at memory takes time."""
    begin = perf_counter()
    plan = open_plan(order, sizes, world_size)
    plan.rows(0)
    opened = perf_counter() - begin
    generator = np.random.default_rng(0)
    anywhere = [look(plan, int(step)) for step in generator.integers(0, plan.n_steps, N_LOOKS)]
    onward = [look(plan, step) for step in range(N_LOOKS)]
    tracemalloc.start()
    open_plan(order, sizes, world_size).rows(plan.n_steps // 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "open_s": opened,
        "memory_mib": peak / 2**20,
        "batch_ms": 1e3 * statistics.median(anywhere),
        "slowest_ms": 1e3 * max(anywhere),
        "next_ms": 1e3 * statistics.mean(onward),  # mean, since the median batch is planned along with others
        "slowest_next_ms": 1e3 * max(onward),
    }


def open_plan(order: OrderParameters, sizes: Any, world_size: int) -> EpochPlan:
    """The plan of the last of all ranks in epoch 7."""
    blocks, rank = BlockTable.of_sizes(sizes), world_size - 1
    sampler = PlanSampler(blocks, order, batch_size=order.batch_size, rank=rank, world_size=world_size)
    return sampler.plan(7)


def look(plan: EpochPlan, step: int) -> float:
    """Seconds to get the rows of a step."""
    begin = perf_counter()
    plan.rows(step)
    return perf_counter() - begin


if __name__ == "__main__":
    main()
