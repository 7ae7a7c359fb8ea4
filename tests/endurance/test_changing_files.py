"""Files that are truncated, edited, replaced or deleted under training: no wrong row, and an error that says what."""

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from changes import DEEDS, SPAN, UNDONE, ByProcess, ByThread, Deed
from factories import make_older
from guards import HANG

from lightning_h5 import (
    CombinedHDF5DataModule,
    H5DataChangedError,
    H5Error,
    H5LazyDataset,
    LazyH5DataModule,
    RankCachedH5DataModule,
)
from lightning_h5.hdf5 import open_file, process_pool
from lightning_h5.samples import row_table

ROWS, WIDTH, CHUNK, BATCH = 320, 1024, 16, 8  # of each of two files
STORAGE = {
    "contiguous": {},
    "gzip": {"chunks": (CHUNK, WIDTH), "compression": "gzip", "compression_opts": 0},
    "HDF5 library": {"chunks": (CHUNK, WIDTH), "scaleoffset": 8},
}
KINDS = ("lazy", "combined", "combined, rows kept", "rank cached")


def values(which, n_rows=ROWS):
    """Random bytes, which no compressor makes smaller: chunks of all files lie in the same places."""
    return np.random.default_rng(which).integers(0, 256, (n_rows, WIDTH), "u1")


FIRST, SECOND, OTHER = values(0), values(1), values(2)
TRUTH = np.concatenate([FIRST, SECOND])
CHANGED = np.concatenate([FIRST, OTHER])


@dataclass(frozen=True)
class Case:
    """One run, drawn by its number."""

    number: int
    deed: str
    kind: str
    storage: str
    is_held: bool
    n_workers: int
    prefetch_factor: int | None
    step: int
    by_process: bool


def draw(number):
    deeds = list(DEEDS)
    random.Random(number // len(deeds)).shuffle(deeds)  # each of them comes equally often
    chosen = random.Random(10_000 + number)
    return Case(
        number,
        deed=deeds[number % len(deeds)],
        kind=chosen.choices(KINDS, [4, 3, 1, 1])[0],
        storage=chosen.choice(list(STORAGE)),
        is_held=chosen.random() < 0.2,
        n_workers=chosen.choice([0, 0, 2]),
        prefetch_factor=chosen.choice([None, 1, 2]),
        step=chosen.randrange(1, 2 * ROWS // BATCH),
        by_process=chosen.random() < 0.5,
    )


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """For each storage the files, and where the values of the second one lie."""
    found = {}
    for name, options in STORAGE.items():
        folder = tmp_path_factory.mktemp("templates")
        for file, rows in {"a": FIRST, "b": SECOND, "other": OTHER, "longer": values(3, ROWS + CHUNK)}.items():
            with h5py.File(folder / f"{file}.h5", "w") as h5:
                h5.create_dataset("x", data=rows, **options)
        with h5py.File(folder / "b.h5") as h5, h5py.File(folder / "other.h5") as other:
            places, others = places_of(h5["x"]), places_of(other["x"])
        assert places == others
        found[name] = folder, places
    return found


def places_of(array):
    if array.chunks is None:
        start = array.id.get_offset()
        return [(start + at, SPAN) for at in range(0, array.nbytes, SPAN)]
    chunks = (array.id.get_chunk_info(at) for at in range(array.id.get_num_chunks()))
    return [(chunk.byte_offset, chunk.size) for chunk in chunks]


@pytest.fixture(scope="module")
def doers():
    by_process = ByProcess()
    yield {True: by_process, False: ByThread()}
    by_process.close()


def module_of(case, paths):
    options = {"batch_size": BATCH, "num_workers": case.n_workers, "prefetch_factor": case.prefetch_factor}
    options |= {"rank": 0, "world_size": 1, "timeout": HANG, "seed": case.number}
    if case.kind.startswith("combined"):
        return CombinedHDF5DataModule(paths, **nested(cache_size=50 if "kept" in case.kind else 0, **options))
    kind = RankCachedH5DataModule if case.kind == "rank cached" else LazyH5DataModule
    return kind(paths, **nested(x_key="x", **options))


class Told:
    """What the runs have shown."""

    def __init__(self):
        self.n, self.batches, self.wrong, self.ends = 0, 0, [], Counter()

    def __str__(self):
        ends = ", ".join(f"{end} {n}" for end, n in sorted(self.ends.items()))
        return f"files changed under training: {self.n} runs, {self.batches} batches, {len(self.wrong)} wrong; {ends}"


def take(batches, rows_of_steps, told, case, truths=(TRUTH,), *, until=None):
    """Takes batches, each held to the truth; up to a number of them."""
    for step, rows in enumerate(rows_of_steps):
        if step == until:
            return
        batch = next(batches)
        x = (batch["x"] if isinstance(batch, dict) else batch).numpy()
        told.batches += 1
        if not any(np.array_equal(x, truth[rows]) for truth in truths):
            told.wrong.append((case, step))


def play(case, folder, templates, doers, told, monkeypatch):
    """One run: an epoch during which a file changes, and another one after it."""
    template, places = templates[case.storage]
    paths = [shutil.copyfile(template / f"{name}.h5", folder / f"{case.number}{name}.h5") for name in "ab"]
    for path in paths:
        make_older(path)
    paths = list(map(str, paths))
    monkeypatch.setattr(row_table, "HELD_BYTES", row_table.HELD_BYTES if case.is_held else -1)
    module, doer = module_of(case, paths), doers[case.by_process]
    module.setup("fit")
    loader = module.train_dataloader()
    rows = [token.rows for token in loader.sampler.tokens(0)]
    batches, error, when = iter(loader), None, "while it changed"
    deed = Deed(paths[1], str(template / "other.h5"), str(template / "longer.h5"), places, case.number)
    take(batches, rows, told, case, until=case.step)
    doer.start(deed, case.deed)
    try:
        take(batches, rows[case.step :], told, case)
        assert next(batches, None) is None
        doer.join()
        when = "in the next epoch"
        again = [token.rows for token in loader.sampler.tokens(loader.sampler.starting_epoch())]
        take(iter(loader), again, told, case)
    except H5DataChangedError as caught:
        error = caught
        if when == "while it changed":
            doer.join()
    judge(case, paths[1], error)
    if case.deed in UNDONE:  # nothing of the other file was kept
        again = [token.rows for token in loader.sampler.tokens(loader.sampler.starting_epoch())]
        take(iter(loader), again, told, case)
    told.n += 1
    told.ends["went on rightly" if error is None else f"refused {when}"] += 1
    loader.close()
    module.teardown("fit")
    process_pool().close()
    for path in folder.glob(f"{case.number}[ab].h5*"):
        os.unlink(path)


def judge(case, path, error):
    if case.kind == "rank cached":  # its rows are in memory
        assert error is None, error
    elif error is None:
        assert case.deed in UNDONE, case
    else:
        assert repr(path) in str(error)
        assert any(words in str(error) for words in DEEDS[case.deed]), error


@pytest.mark.wide
@pytest.mark.parametrize(
    "numbers",
    [range(65), pytest.param(range(65, 265), marks=pytest.mark.slow)],
    ids=["65 runs", "200 runs"],
)
def test_no_wrong_row_comes_from_a_file_that_changes_and_the_error_says_what_did(
    tmp_path, templates, doers, monkeypatch, numbers
):
    told = Told()
    for number in numbers:
        case = draw(number)
        try:
            with monkeypatch.context() as patch:
                play(case, tmp_path, templates, doers, told, patch)
        except BaseException:
            print("failed:", case)
            raise
    print(told)
    assert told.wrong == []


@pytest.mark.wide
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("is_held", [False, True], ids=["read", "held"])
@pytest.mark.parametrize(
    "options",
    [{}, {"mmap": True}, {"num_workers": 2, "persistent_workers": True}],
    ids=["in this process", "mapped", "workers that live on"],
)
def test_rows_are_right_once_a_file_is_put_back_that_another_one_was_read_for(
    tmp_path, templates, monkeypatch, storage, is_held, options
):
    template, _ = templates[storage]
    path = str(shutil.copyfile(template / "a.h5", tmp_path / "a.h5"))
    make_older(path)
    monkeypatch.setattr(row_table, "HELD_BYTES", row_table.HELD_BYTES if is_held else -1)
    module = LazyH5DataModule(
        path, **nested(x_key="x", batch_size=BATCH, shuffle=False, rank=0, world_size=1, **options)
    )
    module.setup("fit")
    loader = module.train_dataloader()
    os.rename(path, f"{path}.away")
    shutil.copyfile(template / "other.h5", path)
    with pytest.raises(H5DataChangedError, match="was replaced by another file"):
        list(loader)
    os.replace(f"{path}.away", path)
    assert np.array_equal(torch.cat(list(loader)).numpy(), FIRST)
    loader.close()
    module.teardown("fit")


@pytest.mark.parametrize("storage", ["gzip", "HDF5 library"])
def test_a_file_that_is_another_one_only_while_it_is_read_ahead_gives_its_own_rows(
    tmp_path, templates, monkeypatch, storage
):
    """Nothing of it is seen before or after: no guard is compared while it is the other one."""
    template, _ = templates[storage]
    path = str(shutil.copyfile(template / "a.h5", tmp_path / "a.h5"))
    make_older(path)
    monkeypatch.setattr(row_table, "HELD_BYTES", -1)
    dataset = H5LazyDataset(path, "x")
    os.rename(path, f"{path}.away")
    shutil.copyfile(template / "other.h5", path)
    rows = np.arange(ROWS)
    assert dataset.prefetch(rows)
    n_tasks = 0
    while dataset.work.help():
        n_tasks += 1
    assert n_tasks > 0
    os.replace(f"{path}.away", path)
    assert np.array_equal(dataset.gather(rows).columns[0].numpy(), FIRST)
    dataset.close()


def test_what_was_decoded_of_a_file_that_was_written_to_is_forgotten_with_the_error(tmp_path, templates, monkeypatch):
    """A copy that keeps times (``cp -p``) puts content, size and time back: the guard says that all is as it was."""
    template, _ = templates["gzip"]
    path = str(shutil.copyfile(template / "a.h5", tmp_path / "a.h5"))
    make_older(path)
    shutil.copy2(path, f"{path}.kept")
    monkeypatch.setattr(row_table, "HELD_BYTES", -1)
    dataset, rows = H5LazyDataset(path, "x"), np.arange(ROWS)
    shutil.copyfile(template / "other.h5", path)
    with pytest.raises(H5DataChangedError, match="was written to"):
        dataset.gather(rows)
    shutil.copy2(f"{path}.kept", path)
    assert np.array_equal(dataset.gather(rows).columns[0].numpy(), FIRST)
    dataset.close()


SETUPS = ("replace", "overwrite", "replace_by_longer")
LONGER = np.concatenate([FIRST, values(3, ROWS + CHUNK)])


def set_up_meanwhile(number, folder, templates, doers, told):
    """A file becomes another one while a data module looks at it, or a moment before or after."""
    chosen = random.Random(number)
    case = Case(
        number, chosen.choice(SETUPS), KINDS[number % 4], chosen.choice(list(STORAGE)), True, 0, None, 0, number % 3 > 0
    )
    template, places = templates[case.storage]
    paths = [str(shutil.copyfile(template / f"{name}.h5", folder / f"s{number}{name}.h5")) for name in "ab"]
    for path in paths:
        make_older(path)
    deed = Deed(paths[1], str(template / "other.h5"), str(template / "longer.h5"), places, number)
    module, doer, found = module_of(case, paths), doers[case.by_process], []
    doer.start(deed, case.deed, chosen.uniform(0, 0.02))
    try:
        module.setup("fit")
        loader = module.train_dataloader()
        for token, batch in zip(loader.sampler.tokens(0), loader, strict=True):
            found.append((token.rows, batch["x"] if isinstance(batch, dict) else batch))
        end = "one version"
    except H5Error as error:  # it was empty for a moment, or half of it was there, or it changed
        end = "refused" if repr(paths[1]) in str(error) else f"no name in {error}"
    doer.join()
    told.n += 1
    told.ends[end] += 1
    told.batches += len(found)
    if not any(holds(truth, found) for truth in (TRUTH, CHANGED, LONGER)):
        told.wrong.append(case)
    process_pool().close()


def holds(truth, found):
    return all(rows.max() < len(truth) and np.array_equal(x.numpy(), truth[rows]) for rows, x in found)


@pytest.mark.parametrize(
    "numbers",
    [range(24), pytest.param(range(24, 324), marks=pytest.mark.slow)],
    ids=["24 runs", "300 runs"],
)
def test_a_file_that_changes_during_setup_is_refused_or_read_as_one_version(tmp_path, templates, doers, numbers):
    told = Told()
    for number in numbers:
        set_up_meanwhile(number, tmp_path, templates, doers, told)
    print("during setup:", told)
    assert told.wrong == []
    assert set(told.ends) <= {"refused", "one version"}


@pytest.fixture
def path(tmp_path, templates):
    """A file; ``moved.h5`` beside it has its values elsewhere, where the places of this one would be wrong."""
    template, _ = templates["contiguous"]
    with h5py.File(tmp_path / "moved.h5", "w") as file:
        file["before"] = np.zeros(1000)
        file["x"] = OTHER
    return str(shutil.copyfile(template / "a.h5", tmp_path / "a.h5"))


OPENINGS = [(open_file, "open_h5"), (open_file.OpenFile, "_open_by_position")]


@pytest.mark.parametrize(("owner", "name"), OPENINGS)
def test_a_file_that_is_replaced_just_as_it_was_opened_is_refused_or_read_as_one_version(
    path, tmp_path, monkeypatch, owner, name
):
    original = getattr(owner, name)

    def open_and_replace(*arguments, **options):
        opened = original(*arguments, **options)
        if (tmp_path / "moved.h5").exists():
            os.replace(tmp_path / "moved.h5", path)
        return opened

    monkeypatch.setattr(owner, name, open_and_replace)
    module = LazyH5DataModule(
        path,
        x_key="x",
        batch_size=BATCH,
        distributed={"rank": 0, "world_size": 1},
    )
    try:
        module.setup("fit")
        loader = module.train_dataloader()
        found = torch.cat(list(loader)).numpy()
    except H5DataChangedError:
        pass
    else:
        rows = np.concatenate([token.rows for token in loader.sampler.tokens(0)])
        assert np.array_equal(found, FIRST[rows]) or np.array_equal(found, OTHER[rows])


@pytest.mark.parametrize(("owner", "name"), OPENINGS)
def test_a_file_that_is_another_one_only_while_setup_opens_it_is_refused(path, tmp_path, monkeypatch, owner, name):
    """The guard is of the one, the places of rows would be of the other."""
    original = getattr(owner, name)

    def open_another(*arguments, **options):
        os.rename(path, f"{path}.away")
        shutil.copyfile(tmp_path / "moved.h5", path)
        opened = original(*arguments, **options)
        os.replace(f"{path}.away", path)
        return opened

    monkeypatch.setattr(owner, name, open_another)
    with pytest.raises(H5DataChangedError, match="was replaced by another file"):
        H5LazyDataset(path, "x")
