"""The memory of the processes of a loader, without what a training script does not import, such as Matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning_h5 import create_optimized_dataloader


def memory_of_epochs(paths: Sequence[Path], n_workers: int, n_epochs: int) -> dict[str, float]:
    """Proportional memory of this process and its workers, and their descriptors."""
    # Workers are forked, as those of a user's script are. By default they would start as this process did, and each of
    # them would import Lightning again.
    loader = create_optimized_dataloader(
        hdf5_files=paths, num_workers=n_workers, cs_label=True, workers={"start_method": "fork"}
    )
    seen = []
    for number in range(n_epochs):
        loader.sampler.set_epoch(number)
        for _ in loader:
            pass
        seen.append(all_processes())
    loader.close()
    settled = seen[min(4, n_epochs - 1) :]
    return {
        "mib": max(mib for mib, _ in seen),
        "growth": (settled[-1][0] - settled[0][0]) / max(1, len(settled) - 1),
        "descriptors": seen[-1][1] - seen[min(1, n_epochs - 1)][1],
    }


def all_processes() -> tuple[float, int]:
    """MiB that this process and its children take, shared pages counted once among them; and their descriptors."""
    me = os.getpid()
    family = [me, *(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == me)]
    mib = 0.0
    for pid in family:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        mib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return mib, sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in family)


def parent_of(pid: int) -> int:
    """The process that started another; 0 where that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
