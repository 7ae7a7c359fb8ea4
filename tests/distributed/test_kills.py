"""Real kills of real ranks at any batch: a resumed run trains on exactly the rest, in the order of an unbroken run.

What the runs have trained on is told by the model's own history (see ``killing``), never by the saved position.
"""

import random
import signal
import threading
from dataclasses import replace
from typing import NamedTuple

import h5py
import numpy as np
import pytest
import torch
from killing import InPlace, Job, Outside, newest, train
from processes import run_ranks, values

ROWS, EPOCHS = 61, 3

OPTIONS = {
    "plain": {},
    "OneCycleLR": {"one_cycle": True},
    "accumulating": {"trainer": {"accumulate_grad_batches": 2}},
    "limited": {"trainer": {"limit_train_batches": 5}},
    "reloading": {"trainer": {"reload_dataloaders_every_n_epochs": 1}},
    "no sanity check": {"trainer": {"num_sanity_val_steps": 0}},
    "validating often": {"trainer": {"val_check_interval": 3}},
    "validating each batch": {"trainer": {"val_check_interval": 1}},
    "drop_last": {"data": {"drop_last": True}},
    "unshuffled": {"data": {"shuffle": False}},
}
WORKERS = {
    "w0": {},
    "w2": {"num_workers": 2, "persistent_workers": False},
    "w2p": {"num_workers": 2, "persistent_workers": True},
}


class Start(NamedTuple):
    """One start of the program, and how it stops after ``at`` batches of its own; None lets it train to the end."""

    way: str | None
    at: int = 0
    world_size: int = 1
    batch_size: int = 4
    workers: str = "w0"
    every: int = 1

    @property
    def cut(self):
        return self.world_size, self.batch_size


class Point(NamedTuple):
    starts: tuple[Start, ...]
    options: str = "plain"

    @property
    def is_elastic(self):
        return len({start.cut for start in self.starts}) > 1

    def __str__(self):
        stops = ", ".join(
            f"{start.way or 'the rest'}{f' at {start.at}' if start.way else ''} "
            f"({start.world_size}x{start.batch_size} {start.workers})"
            for start in self.starts
        )
        return f"{self.options}: {stops}"


def steps_of(world_size, batch_size, options="plain"):
    """Steps of a whole epoch."""
    limit = OPTIONS[options].get("trainer", {}).get("limit_train_batches", ROWS)
    full, rest = divmod(ROWS, world_size * batch_size)
    return min(limit, full + (rest > 0 and options != "drop_last"))


# Playing a point ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("kills") / "rows.h5"
    with h5py.File(path, "w") as h5:
        h5["x"] = np.arange(ROWS, dtype="f4")[:, None] / 64
    return str(path)


@pytest.fixture(scope="module")
def unbroken(file, tmp_path_factory):
    """History and weights of a run that nothing stops, trained once for each set of options."""
    found = {}

    def train_through(world_size, batch_size, options):
        key = (world_size, batch_size, options)
        if key not in found:
            start = Start(None, 0, world_size, batch_size)
            found[key] = values(run(job_of(start, options, file, tmp_path_factory.mktemp("whole"))))[0]
        return found[key]

    return train_through


def job_of(start, options, file, folder, resume=None):
    options = {"trainer": {}, "data": {}, "one_cycle": False} | OPTIONS[options]
    return Job(
        file=file,
        folder=str(folder),
        world_size=start.world_size,
        batch_size=start.batch_size,
        data=options["data"] | WORKERS[start.workers],
        trainer=options["trainer"] | {"max_epochs": EPOCHS},
        one_cycle=options["one_cycle"],
        way=start.way,
        at=start.at,
        every=start.every,
        resume=resume,
        pause=0.01 if "from outside" in str(start.way) else 0.0,
    )


def run(job):
    (journal := job.folder_path / "journal").unlink(missing_ok=True)
    outside = None
    if "from outside" in str(job.way):
        outside = Outside(journal, job, signal.SIGTERM if "SIGTERM" in job.way else signal.SIGKILL)
        threading.Thread(target=outside, daemon=True).start()
    try:
        return run_ranks(train, job.world_size, job.folder, job, patience=5)
    finally:
        if outside is not None:
            outside.is_over = True


def play(point, file, folder, unbroken):
    """Runs all starts of a point, each from the newest checkpoint of those before; checks every history."""
    first = point.starts[0]
    whole, weights = unbroken(*first.cut, point.options)
    resume, history = None, []
    for start in point.starts[:-1]:
        before = len(history)
        stopped_as_asked(start, run(job_of(start, point.options, file, folder, resume)))
        resume, history = newest(folder)
        assert rows_in_order(history) == rows_in_order(whole)[: len(rows_in_order(history))]
        if point.options != "accumulating" and (expected := saved_steps(start, before, point.options)) is not None:
            assert len(history) == expected, "it stopped somewhere else"
    found, found_weights = values(run(job_of(point.starts[-1], point.options, file, folder, resume)))[0]
    assert rows_in_order(found) == rows_in_order(whole)
    if not point.is_elastic:
        assert found == whole
        assert point.options == "accumulating" or found_weights == weights


def rows_in_order(history):
    return [(epoch, row) for epoch, rows in history for row in rows]


def saved_steps(start, before, options):
    """Steps in the history of the newest checkpoint, after ``before`` in the one that was resumed; None: any number."""
    match start.way:
        case "killed from outside" | "SIGTERM from outside":
            return None
        case "killed after an epoch's checkpoint":
            steps = steps_of(*start.cut, options)
            return start.at // steps * steps
        case "killed batches after a save":
            return max(before, (before + start.at) // start.every * start.every)
        case "killed while writing":
            return before + start.at - 1
        case "killed on the way in":
            return before
        case "SIGTERM":
            return before + start.at + 1
    return before + start.at


def stopped_as_asked(start, outcomes):
    codes, errors = [outcome.exitcode for outcome in outcomes], [outcome.error for outcome in outcomes]
    said = "\n".join(outcome.output[-3000:] for outcome in outcomes)
    match start.way:
        case "one rank killed" | "killed while writing":
            assert -signal.SIGKILL in codes, said
            assert 0 not in codes, said
        case "SIGTERM" | "SIGTERM from outside":
            assert all(str(error).startswith("SIGTERMException") for error in errors), said
        case "SIGINT":
            assert set(errors) == {"SystemExit: 1"}, said
        case "max_steps" | "should_stop":
            assert set(codes) == {0}, said
        case _ if start.way.startswith("failed"):
            assert set(errors) == {"RuntimeError: stop here"}, said
        case _:
            assert set(codes) == {-signal.SIGKILL}, said


# The points --------------------------------------------------------------------------------------------------------

# Whether a way strikes before or after the batch whose number decides, or at an epoch's edge.
WAYS = {
    "killed after a save": "after",
    "saved by hand and killed": "after",
    "saved before a batch and killed": "before",
    "saved at an epoch's start and killed": "start",
    "saved at an epoch's end and killed": "end",
    "one rank killed": "before",
    "killed batches after a save": "before",
    "killed while writing": "after",
    "killed inside a validation": "after",
    "killed after a validation": "after",
    "killed after an epoch's checkpoint": "before",
    "killed from outside": "after",
    "SIGTERM": "before",
    "SIGTERM from outside": "after",
    "SIGINT": "before",
    "failed before a step": "before",
    "failed in a step": "before",
    "failed at a batch's end": "after",
    "max_steps": "after",
    "should_stop": "after",
}
VALIDATES = ("killed inside a validation", "killed after a validation")
FROM_OUTSIDE = ("killed from outside", "SIGTERM from outside")
WORLDS = [(1, 1), (2, 2), (2, 1), (1, 2), (2, 4), (4, 1)]


def at(way, epoch, batch, steps):
    """Batches trained when a way strikes at a batch of an epoch."""
    return epoch * steps + {"after": batch + 1, "before": batch, "start": 0, "end": steps}[WAYS[way]]


def matrix(per_way=6):
    """Every way at the first, second, last but one, last and random batches of each epoch; all else drawn."""
    draw = random.Random(1)
    points = []
    for number, way in enumerate(WAYS):
        for turn in range(per_way):
            worlds = (1, 1) if way == "SIGTERM from outside" else WORLDS[(number + turn) % len(WORLDS)]
            points.append(drawn_point(draw, way, epoch=turn % EPOCHS, position=number + turn, worlds=worlds))
    return points


def drawn_point(draw, way, epoch, position, worlds):
    batch_size = draw.choice([4, 4, 4, 2, 3, 5, 6])
    options = drawn_options(draw, way, is_elastic=worlds[0] != worlds[1] or batch_size != 4)
    steps = steps_of(worlds[0], 4, options)
    batch = [0, 1, steps - 2, steps - 1, draw.randrange(steps), draw.randrange(steps)][position % 6]
    stop = at(way, epoch, batch, steps)
    if way in FROM_OUTSIDE:
        stop = min(stop, EPOCHS * steps - 3)
    every = {"killed batches after a save": 3, "killed from outside": draw.choice([1, 2])}.get(way, 1)
    starts = [Start(way, stop, worlds[0], 4, draw.choice([*WORKERS]), every)]
    go_on = Start(None, 0, worlds[1], batch_size)
    if (epoch < EPOCHS - 1 or batch < 2) and draw.random() < 0.5:
        again = draw.choice([other for other in WAYS if fits(other, options) and other != way])
        starts.append(go_on._replace(way=again, at=draw.choice([1, 2]), workers=draw.choice([*WORKERS])))
    elif draw.random() < 0.3:
        starts.append(go_on._replace(way="killed on the way in", workers=draw.choice([*WORKERS])))
    return Point((*starts, go_on._replace(workers=draw.choice([*WORKERS]))), options)


def drawn_options(draw, way, is_elastic):
    if way in VALIDATES:
        return "validating each batch"
    same = [] if is_elastic else ["limited", "drop_last"] * 2
    if way != "max_steps":  # it changes the schedule, and counts steps of the optimizer
        same += [] if is_elastic else ["OneCycleLR"] * 2
        same += [] if way == "SIGINT" else ["accumulating"]
    return draw.choice([*same, "plain", "reloading", "no sanity check", "unshuffled", "validating often"])


def fits(way, options):
    """Whether a way can strike a second time, in the middle of an epoch."""
    if way in FROM_OUTSIDE or WAYS[way] in ("start", "end") or way == "killed after an epoch's checkpoint":
        return False
    if way in VALIDATES:
        return options == "validating each batch"
    return not (way in ("SIGINT", "max_steps") and options in ("accumulating", "OneCycleLR"))


ONE, TWO = steps_of(1, 4), steps_of(2, 4)
BY_HAND, FAILED = "saved by hand and killed", "failed in a step"


def chain(*starts, options="plain"):
    """Starts on one rank, unless they say more; the last of them is to come to the end."""
    return Point(tuple(Start(*start) if isinstance(start, tuple) else start for start in starts), options)


TEN = [
    chain(("killed after a save", 1), ("one rank killed", 1), (None,), options="OneCycleLR"),
    chain(
        ("killed after a save", TWO, 2, 4, "w2p"), ("killed on the way in", 0, 2), (FAILED, 1, 2), (None, 0, 2, 4, "w2")
    ),
    chain(("one rank killed", TWO + 1, 2), ("SIGTERM", 2, 2), (None, 0, 1, 3), options="no sanity check"),
    chain(("killed while writing", 2 * ONE - 1, 1, 4, "w2"), (BY_HAND, 1, 2), (None, 0, 2), options="reloading"),
    chain(
        ("killed inside a validation", 2 * TWO, 2),
        ("killed after a validation", 1, 2),
        (None, 0, 2),
        options="validating each batch",
    ),
    chain(("killed batches after a save", ONE + 2, 1, 4, "w2p", 3), ("SIGINT", 1), (None,), options="OneCycleLR"),
    chain(("killed from outside", ONE + 4, 1, 4, "w2"), ("max_steps", 2), (None, 0, 2, 5)),
    chain(
        ("saved at an epoch's end and killed", TWO, 2),
        ("saved at an epoch's start and killed", TWO, 2),
        ("failed before a step", TWO - 1, 2),
        ("failed at a batch's end", 1, 2),
        (None, 0, 2),
    ),
    chain(
        ("killed after an epoch's checkpoint", 2 * TWO - 1, 2),
        ("saved before a batch and killed", TWO - 1, 2),
        (None, 0, 2, 4, "w2"),
        options="accumulating",
    ),
    chain(("SIGTERM from outside", ONE + 3), ("should_stop", 1, 1, 6), (None, 0, 1, 6)),
]
MATRIX = matrix()


@pytest.mark.wide
@pytest.mark.parametrize("point", TEN, ids=str)
def test_the_rest_of_an_epoch_after_each_way_to_stop(point, file, tmp_path, unbroken):
    play(point, file, tmp_path, unbroken)


def test_these_ten_meet_every_way_to_stop():
    assert {start.way for point in TEN for start in point.starts} == {*WAYS, "killed on the way in", None}


def test_there_are_points_for_every_way_at_every_edge_of_an_epoch():
    assert len({str(point) for point in MATRIX}) >= 90
    assert {point.starts[0].way for point in MATRIX} == set(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("point", MATRIX, ids=str)
def test_the_rest_of_an_epoch_after_any_kill(point, file, tmp_path, unbroken):
    play(point, file, tmp_path, unbroken)


def at_an_edge(way, options):
    """Stops at the edge between the first two epochs, and twice in the second."""
    steps = steps_of(2, 4, options)
    batch = 0 if WAYS[way] == "before" else steps - 1
    stop = at(way, int(WAYS[way] == "before"), batch, steps)
    return chain((way, stop, 2), (BY_HAND, steps // 2 - 1, 2), (BY_HAND, 1, 2), (None, 0, 2), options=options)


def to_an_edge(first, way):
    """Stops in the middle of an epoch that ``limit_train_batches`` ends, at its last batch, and in the next one."""
    stop = {"after": 3, "before": 2, "end": 3}[WAYS[way]]
    return chain((first, 2, 2), (way, stop, 2), (BY_HAND, 2, 2), (None, 0, 2), options="limited")


INSIDE = [way for way in WAYS if way not in (*FROM_OUTSIDE, *VALIDATES)]
EDGES = [
    *(at_an_edge(way, "plain") for way in INSIDE),
    *(at_an_edge(way, "limited") for way in INSIDE),
    *(at_an_edge(way, "validating each batch") for way in VALIDATES),
    *(
        to_an_edge(first, way)
        for first in (BY_HAND, FAILED)
        for way in INSIDE
        if WAYS[way] != "start" and way != "killed after an epoch's checkpoint"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("point", EDGES, ids=str)
def test_three_stops_around_the_edge_of_an_epoch(point, file, tmp_path, unbroken):
    play(point, file, tmp_path, unbroken)


# Single claims -----------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 4])
def test_unbroken_runs_on_any_number_of_ranks_have_one_order(unbroken, world_size):
    """What all comparisons of runs on different numbers of ranks rest on."""
    assert rows_in_order(unbroken(world_size, 4, "plain")[0]) == rows_in_order(unbroken(1, 4, "plain")[0])


@pytest.mark.wide
@pytest.mark.parametrize("first", [BY_HAND, pytest.param(FAILED, marks=pytest.mark.wide)])
def test_two_elastic_changes_in_one_epoch(first, file, tmp_path, unbroken):
    play(chain((first, TWO + 3, 2), (BY_HAND, 2, 1, 3), (None, 0, 4, 2)), file, tmp_path, unbroken)


@pytest.mark.parametrize(("before", "after"), [("w2", "w0"), ("w0", "w2"), ("w2p", "w0"), ("w0", "w2p")])
def test_another_number_of_workers_goes_on_with_the_rest(before, after, file, tmp_path, unbroken):
    play(chain((FAILED, ONE + 5, 1, 4, before), (None, 0, 1, 4, after)), file, tmp_path, unbroken)


@pytest.mark.wide
@pytest.mark.parametrize("first", [BY_HAND, "killed after a save"])
def test_two_kills_in_an_epoch_with_a_limit(first, file, tmp_path, unbroken):
    play(chain((first, 7), (BY_HAND, 2), (None,), options="limited"), file, tmp_path, unbroken)


@pytest.mark.wide
def test_the_sanity_check_of_a_resumed_run_may_be_killed(file, tmp_path, unbroken):
    """Lightning checks only where an epoch was complete; the kill must meet the check, not the start after it."""
    play(
        chain(("saved at an epoch's end and killed", ONE), ("killed on the way in",), (None,)), file, tmp_path, unbroken
    )
    assert any("died in the sanity check" in log.read_text() for log in tmp_path.glob("rank0.*.log"))


def go_through(starts, options, file, folder):
    """Runs all starts; the history of the last, and its rows epoch by epoch."""
    resume = None
    for start in starts[:-1]:
        stopped_as_asked(start, run(job_of(start, options, file, folder, resume)))
        resume, _ = newest(folder)
    history = values(run(job_of(starts[-1], options, file, folder, resume)))[0][0]
    return [[row for epoch, row in rows_in_order(history) if epoch == wanted] for wanted in range(EPOCHS)]


# In the epoch of the change the limit counts what is trained in present batches: 2 of 2 ranks are 4 of one.
@pytest.mark.wide
@pytest.mark.parametrize(
    ("starts", "rows"),
    [
        pytest.param([(BY_HAND, 2, 2), (None, 0, 1)], [20, 20, 20], id="2 to 1"),
        pytest.param([(BY_HAND, 2, 1), (None, 0, 2)], [40, 40, 40], id="1 to 2"),
        pytest.param([(BY_HAND, 3, 1), (None, 0, 2)], [44, 40, 40], id="1 to 2, not a whole round"),
        pytest.param([(BY_HAND, 2, 1), (None, 0, 1, 8)], [40, 40, 40], id="twice the batch"),
        pytest.param([(BY_HAND, 2, 2), (BY_HAND, 1, 1), (None, 0, 1)], [20, 20, 20], id="2 to 1, twice"),
        pytest.param(
            [(BY_HAND, 3, 2), (None, 0, 1)],
            [24, 20, 20],
            id="2 to 1, past the limit",
        ),
        pytest.param(
            [(BY_HAND, 4, 2), (BY_HAND, 1, 1), (None, 0, 1)],
            [32, 20, 20],
            id="2 to 1, past the limit, twice",
        ),
    ],
)
def test_a_limit_ends_the_epoch_of_an_elastic_change_too(starts, rows, file, tmp_path, unbroken):
    whole = rows_in_order(unbroken(1, 4, "plain")[0])
    epochs = go_through(chain(*starts).starts, "limited", file, tmp_path)
    for epoch, found in enumerate(epochs):
        assert found == [row for wanted, row in whole if wanted == epoch][: len(found)]
    assert [len(epoch) for epoch in epochs] == rows


@pytest.mark.wide
def test_fewer_rows_left_than_ranks_sit_out(file, tmp_path, unbroken):
    """Two rows cannot be shared among four ranks; all else is as in an unbroken run."""
    whole = rows_in_order(unbroken(1, 4, "plain")[0])
    epochs = go_through(chain((BY_HAND, ONE - 1), (None, 0, 4)).starts, "plain", file, tmp_path)
    wanted = [[row for epoch, row in whole if epoch == number] for number in range(EPOCHS)]
    assert epochs == [wanted[0][:-2], wanted[1], wanted[2]]
    assert any("2 rows of epoch 0 are left" in log.read_text() for log in tmp_path.glob("rank0.*.log"))


def test_a_torn_checkpoint_fails_loudly_and_the_one_before_goes_on(file, tmp_path, unbroken):
    """A file system or plugin may write in place; Lightning's own writing leaves no torn file under the name."""
    start = Start("killed after a save", ONE)
    job = job_of(start, "plain", file, tmp_path)
    outcomes = run(replace(job, trainer=job.trainer | {"plugins": [InPlace(dies_at=ONE)]}))
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL]
    good, torn = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    rest = job_of(Start(None), "plain", file, tmp_path)
    (outcome,) = run(replace(rest, resume=str(torn)))
    assert outcome.exitcode == 1
    assert outcome.error
    assert not (tmp_path / "journal").exists(), "nothing was trained"
    assert len(torch.load(good, weights_only=True)["history"]) == ONE - 1
    assert values(run(replace(rest, resume=str(good))))[0] == unbroken(1, 4, "plain")
