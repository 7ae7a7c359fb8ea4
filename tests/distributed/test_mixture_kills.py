"""Real kills of ranks that train on mixtures, weighted rows, segments or windows: resumed, they do the rest."""

from dataclasses import replace

import h5py
import numpy as np
import pytest
from killing import Job, newest, train
from mixing import Mixed, Rows
from processes import run_ranks, values

ROWS = 61
KINDS = {
    "concat": (Mixed, {}),
    "sequential": (Mixed, {"sampling_strategy": "sequential"}),
    "round robin": (Mixed, {"sampling_strategy": "round_robin", "epoch_length": "max"}),
    "alternating": (Mixed, {"sampling_strategy": "alternating", "pattern": ["many", "few", "many", "some"]}),
    "weighted": (Mixed, {"sampling_strategy": "weighted", "weights": [5, 3, 2], "epoch_length": 7}),
    "rows": (Mixed, {"sampling_strategy": "weighted", "weights": [5, 3, 2], "mix": "rows"}),
    "by class": (Rows, {"balance_key": "class"}),
    "random windows": (
        Rows,
        {"segments": {"key": "group"}, "window": {"length": 2, "stride": 1, "random": True, "pad": "edge"}},
    ),
    "sequences": (Rows, {"sequence_key": "group", "sequence_order": "row", "collate_fn": "pad"}),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixtures") / "rows.h5"
    rows = np.arange(ROWS)
    with h5py.File(path, "w") as h5:
        h5["x"] = rows.astype("f4")[:, None] / 64
        h5["row"] = rows
        h5["class"] = (rows % 7 == 0).astype("i8")
        h5["group"] = (rows**2 // 97).astype("i8")
    return str(path)


def run(job, **changes):
    job = replace(job, **changes)
    return run_ranks(train, job.world_size, job.folder, job, patience=5)


def kinds_and_ranks():
    """Each kind on one rank or on two in the short suite, on both in the long one."""
    for kind in KINDS:
        for world_size in (1, 2):
            is_long = world_size != (1 if kind in ("concat", "sequential", "alternating", "drawn") else 2)
            yield pytest.param(kind, world_size, marks=[pytest.mark.slow] * is_long)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "world_size"), [*kinds_and_ranks()])
def test_killed_twice_in_the_middle_and_resumed_it_is_the_unbroken_run(kind, world_size, file, tmp_path):
    (whole := tmp_path / "whole").mkdir()
    (broken := tmp_path / "broken").mkdir()
    module, data = KINDS[kind]
    job = Job(file=file, folder=str(whole), world_size=world_size, kind=module, data=data, trainer={"max_epochs": 3})
    history, weights = values(run(job))[0]
    steps = len([epoch for epoch, _ in history if epoch == 0])
    stops = [("killed after a save", steps + 2), ("saved by hand and killed", max(1, steps - 3))]
    resume = None
    for way, at in stops:
        outcomes = run(job, folder=str(broken), way=way, at=at, resume=resume, data=data | {"num_workers": 2})
        assert all(outcome.exitcode < 0 for outcome in outcomes), outcomes[0].output[-3000:]
        resume, so_far = newest(broken)
        assert so_far == history[: len(so_far)]
        assert 0 < len(so_far) < len(history)
    found, found_weights = values(run(job, folder=str(broken), resume=resume))[0]
    assert found == history
    assert found_weights == weights


def kinds_and_changes():
    """Each kind one way or the other in the short suite, one of them both ways; all both ways in the long one."""
    short = {"sequential": (2, 1), "round robin": (1, 2), "by class": (2, 1), "sequences": (1, 2)}
    for kind in ("sequential", "round robin", "rows", "by class", "sequences", "random windows"):
        for change in ((2, 1), (1, 2)):
            is_long = short.get(kind, change) != change
            yield pytest.param(kind, *change, marks=[pytest.mark.slow] * is_long)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "first", "then"), [*kinds_and_changes()])
def test_killed_and_resumed_on_another_number_of_ranks_the_epoch_goes_on_with_the_rest(
    kind, first, then, file, tmp_path
):
    (whole := tmp_path / "whole").mkdir()
    (broken := tmp_path / "broken").mkdir()
    module, data = KINDS[kind]
    job = Job(file=file, folder=str(whole), world_size=first, kind=module, data=data, trainer={"max_epochs": 2})
    history, _ = values(run(job))[0]
    assert run(job, folder=str(broken), way="killed after a save", at=3)[0].exitcode < 0
    resume, so_far = newest(broken)
    assert so_far == history[:3]
    found = values(run(job, folder=str(broken), world_size=then, resume=resume))[0][0]
    for epoch in range(2):
        rows, expected = ([row for at, rows in every if at == epoch for row in rows] for every in (found, history))
        assert rows == expected
