"""Runs of random cases of bad samples, compared with runs over undamaged copies of the files.

With tests and tests/faults on PYTHONPATH:

    python tests/faults/bad_row_runs.py 0 1000        cases 0 to 999, one after the other
    python tests/faults/bad_row_runs.py 17            one case
"""

import logging
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch
from lightning_models import Recorder, SaveAndStop, quiet_trainer
from processes import run_ranks, values
from random_bad_rows import Case, are_equal

from lightning_h5 import H5CorruptError
from lightning_h5.hdf5 import process_pool
from lightning_h5.samples import row_table

EPOCHS = 2


class Expected:
    """The batches of a rank without their bad samples.

    ``epochs`` has the batches, ``bad`` the numbers of the samples that are missing in each, and ``end`` the epoch and
    step of the first batch without any good sample, which raises.
    """

    def __init__(self, case, rank, world_size=None):
        self.epochs, self.bad, self.end, self.places = [], [], None, {}
        for epoch, batches in enumerate(loaded(case, rank, is_bad=False, world_size=world_size)[0]):
            samples = [[(number, one, case.is_left_out(one)) for number, one in batch] for batch in batches]
            self.places |= {number: case.place(one) for batch in samples for number, one, is_out in batch if is_out}
            self.epochs.append([[(number, one) for number, one, is_out in batch if not is_out] for batch in samples])
            self.bad.append([[number for number, _, is_out in batch if is_out] for batch in samples])
            empty = [step for step, batch in enumerate(self.epochs[-1]) if not batch]
            if empty and self.end is None:
                self.end = epoch, empty[0]

    def times_before(self, step):
        """How often each bad sample is left out in the first batches of the run."""
        return Counter(number for numbers in [of for epoch in self.bad for of in epoch][:step] for number in numbers)

    def times(self):
        """How often each bad sample was left out until the run ends."""
        counted = Counter()
        for epoch, batches in enumerate(self.bad):
            for step, numbers in enumerate(batches):
                if self.end is None or (epoch, step) < self.end:
                    counted.update(numbers)
        return counted


def loaded(case, rank, *, is_bad, world_size=None):
    """The batches of each epoch as a loop of one's own takes them, the error that ended it, and the data module."""
    datamodule = case.datamodule(rank, is_bad=is_bad, world_size=world_size or case.world_size)
    epochs, error = [], None
    try:
        with held_or_read(case):
            datamodule.setup("fit")
        loader = datamodule.train_dataloader()
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            epochs.append([])
            for batch in loader:
                epochs[-1].append(case.samples(batch))
            assert len(epochs[-1]) == len(loader), "another number of steps than len(loader)"
        counts = loader.counters.total()
        assert counts["rows"] == sum(len(batch) for of_epoch in epochs for batch in of_epoch), "rows are miscounted"
        left_out = sum(entry.n_times for entry in datamodule._ledger.entries())
        assert counts["left_out"] == left_out, f"left_out is {counts['left_out']}, and the ledger has {left_out}"
    except (H5CorruptError, ZeroDivisionError) as failure:
        error = failure
    finally:
        datamodule.teardown()
    if not is_bad and error is not None:
        raise error
    return epochs, error, datamodule


def held_or_read(case):
    """Read small arrays from the files each time, as large ones are, unless the case holds them."""
    held_bytes = row_table.HELD_BYTES if case.is_held else -1
    return patch.object(row_table, "HELD_BYTES", held_bytes)


def check_case(case):
    """Compare the loops of all ranks with what is expected; return their figures."""
    figures, n_steps, all_times = Counter(), set(), []
    for rank in range(case.world_size):
        expected = Expected(case, rank, case.world_size)
        epochs, error, datamodule = loaded(case, rank, is_bad=True)
        wanted = expected.epochs
        if expected.end is not None:
            epoch, step = expected.end
            wanted = [*wanted[:epoch], wanted[epoch][:step]]
            assert error is not None, f"rank {rank}: no error at {expected.end}, a batch without good samples"
            figures["raised"] += 1
        elif error is not None:
            raise error
        check_batches(epochs, wanted)
        check_ledger(case, datamodule, expected)
        n_steps.add(tuple(map(len, expected.epochs)))
        all_times.append(expected.times())
        figures["batches"] += sum(map(len, epochs))
        figures["left out"] += sum(expected.times().values())
    assert len(n_steps) == 1, f"ranks have other numbers of steps: {n_steps}"
    return figures


def check_batches(epochs, wanted):
    """Compare batches, sample by sample."""
    assert len(epochs) == len(wanted), f"{len(epochs)} epochs, {len(wanted)} expected"
    for epoch, (batches, wanted_batches) in enumerate(zip(epochs, wanted, strict=True)):
        numbers = [[number for number, _ in batch] for batch in batches]
        assert numbers == [[number for number, _ in batch] for batch in wanted_batches], (
            f"epoch {epoch}: {numbers}, expected {[[n for n, _ in batch] for batch in wanted_batches]}"
        )
        for batch, wanted_batch in zip(batches, wanted_batches, strict=True):
            for (number, sample), (_, other) in zip(batch, wanted_batch, strict=True):
                assert are_equal(sample, other), f"epoch {epoch}, sample {number}: {sample}, expected {other}"


def check_ledger(case, datamodule, expected):
    """Compare how often samples were left out, where they are, and why."""
    entries = {entry.sample.number: entry for entry in datamodule._ledger.entries()}
    assert {number: entry.n_times for number, entry in entries.items()} == expected.times()
    for number, (sample, _) in entries.items():
        place = expected.places[number] or (sample.file, sample.place)
        assert (sample.file, sample.place) == place, f"{sample} is said to be sample {number}, which is {place}"
        assert sample.file.startswith(str(case.bad)), f"sample {number} is said to be in {sample.file!r}"
        assert sample.cause.startswith(("H5CorruptError", "ZeroDivisionError")), sample.cause


# Training ----------------------------------------------------------------------------------------------------------


class Batches(Recorder):
    """Remembers batch after batch, and the ledger at the end."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.ledger = {}

    def training_step(self, batch, batch_idx):
        self.train_rows.setdefault(self.current_epoch, []).append(self.case.samples(batch))
        return self.layer(torch.ones(1, 1)).sum()

    def on_train_end(self):
        self.ledger = ledger_of(self.trainer.datamodule)


def ledger_of(datamodule):
    """The entries by stage and number."""
    entries = datamodule._ledger.entries()
    return {(entry.sample.stage, entry.sample.number): (entry.n_times, *entry.sample) for entry in entries}


def trained(case, rank, *, devices=1, world_size=None, callbacks=(), ckpt_path=None, is_bad=True, validates=True):
    """The batches that a fit trained on, by epoch, and the ledger at its end."""
    model = Batches(case)
    options = {} if devices == 1 else {"devices": devices, "strategy": "ddp"}
    if not validates or (world_size or devices) > 1:  # a rank's part of the validation may be one bad chunk, and raises
        options["limit_val_batches"] = 0
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=list(callbacks), num_sanity_val_steps=0, **options)
    datamodule = case.datamodule(rank, is_bad=is_bad, world_size=world_size)
    with held_or_read(case):
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return model.train_rows, model.ledger


def saved_at(case, step, rank=0):
    """The checkpoint of a run that ends after a step."""
    return str(case.bad.parent / f"step{step}.{rank}.ckpt")


def three_runs(rank, case, step, devices=1, world_size=None):
    """What an unbroken run, a run that ends after a step, and one that resumes it trained on."""
    path = saved_at(case, step, 0 if devices > 1 else rank)
    options = {"devices": devices, "world_size": world_size}
    unbroken = trained(case, rank, **options)
    broken = trained(case, rank, callbacks=[SaveAndStop(step, path)], **options)
    resumed = trained(case, rank, ckpt_path=path, **options)
    return unbroken, broken, resumed


def check_resume(case, expected, step, unbroken, broken, resumed):
    """Compare a run that was stopped and resumed with one that was not, and with what is expected."""
    (batches, ledger), (broken, _), (rest, resumed_ledger) = unbroken, broken, resumed
    check_batches([batches[epoch] for epoch in range(EPOCHS)], expected.epochs)
    flat = [batch for epoch in range(EPOCHS) for batch in [*broken.get(epoch, []), *rest.get(epoch, [])]]
    check_batches([flat], [[batch for epoch in expected.epochs for batch in epoch]])
    assert resumed_ledger == ledger, f"stopped at {step}: {resumed_ledger}, unbroken {ledger}"


def in_training(ledger):
    """How often the samples of a ledger were left out in training."""
    return Counter({number: entry[0] for (stage, number), entry in ledger.items() if stage == "train"})


class ExpectedOfOthers:
    """The batches of ranks that resume a run of another number of ranks, as undamaged files give them.

    Attributes:
        epochs: for each rank the batches without bad samples, by epoch.
        times: how often each bad sample is missing in them, over all ranks.
        is_whole: whether each batch has a good sample.
    """

    def __init__(self, case, step, world_size):
        options = {"is_bad": False, "validates": False}
        path = str(case.bad.parent / f"good{step}.{world_size}.ckpt")
        trained(case, 0, world_size=case.world_size, callbacks=[SaveAndStop(step, path)], **options)
        self.epochs, self.times, self.is_whole = [], Counter(), True
        for rank in range(world_size):
            rows, _ = trained(case, rank, world_size=world_size, ckpt_path=path, **options)
            self.epochs.append({epoch: [self._good(case, batch) for batch in rows[epoch]] for epoch in rows})

    def _good(self, case, batch):
        good = [(number, sample) for number, sample in batch if not case.is_left_out(sample)]
        self.times.update(number for number, sample in batch if case.is_left_out(sample))
        self.is_whole &= bool(good)
        return good


def check_other_ranks(case, step, world_size):
    """Resume a run on another number of ranks; return whether its batches all have good samples."""
    expected = ExpectedOfOthers(case, step, world_size)
    if not expected.is_whole:
        return False
    path = str(case.bad.parent / f"bad{step}.{world_size}.ckpt")
    _, saved = trained(case, 0, world_size=case.world_size, callbacks=[SaveAndStop(step, path)], validates=False)
    before, after = in_training(saved), Counter()
    for rank in range(world_size):
        rows, ledger = trained(case, rank, world_size=world_size, ckpt_path=path, validates=False)
        check_rest(rows, expected.epochs[rank])
        after += in_training(ledger) - before
        assert before.keys() <= in_training(ledger).keys(), f"{ledger} lacks some of {saved}"
    check_times(case, before, after, expected.times)
    return True


def check_rest(rows, expected):
    """Compare the batches after a resume."""
    assert rows.keys() == expected.keys(), f"epochs {[*rows]}, expected {[*expected]}"
    check_batches([*rows.values()], [expected[epoch] for epoch in rows])


def check_times(case, before, after, expected):
    """Compare how often samples were left out after a resume with how often they are missing in its batches."""
    if case.module == "cached":  # its interrupted epoch starts over, and does not count twice
        assert after.keys() <= expected.keys() <= (after + before).keys(), f"{before} and {after}, expected {expected}"
    else:
        assert after == expected, f"{after} after {before}, expected {expected}"


def runs_of_rank(rank, cases, steps, devices):
    """What a real rank trains on, case after case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [three_runs(rank, case, step, devices=devices) for case, step in zip(cases, steps, strict=True)]
    return pickle.dumps(runs)  # torch would send the memory of tensors, which ends with this process


def rest_of_rank(rank, cases, steps, devices):
    """What a real rank trains on that resumes runs of another number of ranks, case after case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [
            trained(case, rank, devices=devices, ckpt_path=saved_at(case, step), validates=False)
            for case, step in zip(cases, steps, strict=True)
        ]
    return pickle.dumps(runs)


def check_ranks(seeds, folder, world_size, other_size, **options):
    """Check cases on real ranks, each unbroken, broken and resumed, also on another number of ranks.

    Returns:
        How many end well.
    """
    cases, all_expected, steps = [], [], []
    for seed in seeds:
        case = Case(seed, folder / str(seed), **options)
        case.world_size = world_size
        expected = [Expected(case, rank, world_size) for rank in range(world_size)]
        if not any(of_rank.end for of_rank in expected):
            cases.append(case)
            all_expected.append(expected)
            steps.append(step_of(case, expected[0]))
    for case in cases:
        case.files.is_written = None  # a closure is not sent
    ranks = values(run_ranks(runs_of_rank, world_size, folder, cases, steps, world_size))
    for number, (case, expected, step) in enumerate(zip(cases, all_expected, steps, strict=True)):
        try:
            times = sum((of_rank.times() for of_rank in expected), Counter())
            for rank, of_rank in enumerate(expected):
                unbroken, broken, resumed = pickle.loads(ranks[rank])[number]
                check_resume(case, of_rank, step, unbroken, broken, resumed)
                in_training = {at: entry[0] for (stage, at), entry in unbroken[1].items() if stage == "train"}
                assert in_training == times, f"the ledger of rank {rank} has {in_training}, expected {times}"
        except Exception as error:
            error.add_note(f"case {seeds[number]}: {case}")
            raise
    check_rest_on_other_ranks(cases, all_expected, steps, folder, other_size)
    return len(cases)


def check_rest_on_other_ranks(cases, all_expected, steps, folder, world_size):
    """Resume runs of real ranks on another number of real ranks, which go on with the ledger of all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected_rests = [ExpectedOfOthers(case, step, world_size) for case, step in zip(cases, steps, strict=True)]
    runs = [
        (case, of_ranks, rest, step)
        for case, of_ranks, rest, step in zip(cases, all_expected, expected_rests, steps, strict=True)
        if rest.is_whole
    ]
    arguments = [case for case, _, _, _ in runs], [step for _, _, _, step in runs], world_size
    ranks = values(run_ranks(rest_of_rank, world_size, folder, *arguments))
    for number, (case, of_ranks, rest, step) in enumerate(runs):
        before = sum((of_rank.times_before(step) for of_rank in of_ranks), Counter())
        try:
            for rank in range(world_size):
                rows, ledger = pickle.loads(ranks[rank])[number]
                check_rest(rows, rest.epochs[rank])
                assert before.keys() <= in_training(ledger).keys(), f"{ledger} lacks some of {before}"
                check_times(case, before, in_training(ledger) - before, rest.times)
        except Exception as error:
            error.add_note(f"resumed by {world_size} ranks after step {step}: {case}")
            raise


def step_of(case, expected):
    """The step that a case is stopped after."""
    return 1 + int(case.stop * (sum(map(len, expected.epochs)) - 1))


def run(seed, folder, **options):
    """Check a case, with a resume if it has one; return its figures."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        case = Case(seed, folder, **options)
        try:
            figures = check_case(case)
            for rank in range(case.world_size) if case.is_resumed else ():
                expected = Expected(case, rank, case.world_size)
                if expected.end is None:
                    step = step_of(case, expected)
                    runs = three_runs(rank, case, step, world_size=case.world_size)
                    check_resume(case, expected, step, *runs)
                    figures["resumed"] += 1
                    if not rank:
                        world_size = 1 + (case.world_size + seed % 2) % 3
                        figures["on other ranks"] += check_other_ranks(case, step, world_size)
        except BaseException as error:
            error.add_note(f"case {seed}: {case}")
            raise
        finally:
            process_pool().close()
    return figures | Counter(
        {case.kind: 1, case.module: 1, f"{case.world_size} ranks": 1, f"{case.n_workers} workers": 1}
        | {"lost ends": int(case.has_lost_end)}
    )


def hangs(*_):
    raise TimeoutError("this case hangs")


def main(first, last):
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGALRM, hangs)
    total, failed, began = Counter(), [], time.monotonic()
    for seed in range(first, last):
        signal.alarm(90)
        try:
            with tempfile.TemporaryDirectory() as folder:
                total += run(seed, Path(folder))
        except Exception as error:
            failed.append(seed)
            print("".join(traceback.format_exception(error, limit=-6))[-5000:], flush=True)
        finally:
            signal.alarm(0)
    print(f"{last - first} cases, {time.monotonic() - began:.0f} s, failed: {failed}")
    for name, number in sorted(total.items()):
        print(f"{number:8,} {name}")


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    main(numbers[0], numbers[1] if len(numbers) > 1 else numbers[0] + 1)
