"""Damaged files give right values or an error that names the file; where checksums cover all, never wrong values.

What each level of integrity finds is counted in a table, which is shown with ``-rP``, or by ``-s``. The same with
50,000 mutants: ``pytest -m slow tests/faults/test_fuzz.py -s``.
"""

import faulthandler
import json
import os
from dataclasses import replace

import fuzzing
import h5py
import numpy as np
import pytest
from factories import edit

import lightning_h5.readers.chunk_loader
from lightning_h5 import H5LazyDataset, check_files
from lightning_h5.errors import H5CorruptError

IN_CI, IN_ALL = 2_000, 50_000
DIGESTS_IN_CI, DIGESTS_IN_ALL = 500, 10_000
SLOW = pytest.mark.slow
KEEP = os.environ.get("LIGHTNING_H5_FUZZ_KEEP")  # a folder for mutants that fail


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return fuzzing.make_bases(tmp_path_factory.mktemp("bases"))


def numbers_for(bases, n_mutants):
    return range(-(-n_mutants // len(bases)))


def assert_sound(tally):
    """What holds for any damage, whatever the checksums."""
    assert not tally.listed("hang")
    assert not tally.listed("foreign")
    assert tally.of("right"), "no mutant was read at all: the fuzzer is broken"
    assert tally.of("refused"), "no mutant was refused: the fuzzer damages nothing"


def fuzz_and_show(bases, n_mutants, folder, **options):
    faulthandler.cancel_dump_traceback_later()  # long runs are meant to be long
    tally, table = fuzzing.timed_fuzz(bases, numbers_for(bases, n_mutants), folder, keep=KEEP, **options)
    print(f"\n{table}")
    assert sum(tally.counts.values()) >= n_mutants
    return tally


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n_mutants", [IN_CI, pytest.param(IN_ALL, marks=SLOW)])
def test_damaged_files_give_right_values_or_errors_and_no_wrong_ones_at_level_3(bases, tmp_path, n_mutants):
    tally = fuzz_and_show([base for base in bases if not base.has_heap], n_mutants, tmp_path)
    assert_sound(tally)
    assert not tally.listed("wrong", level=3)
    assert tally.of("wrong", level=0), "the fuzzer finds nothing where nothing is checked"


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n_mutants", [IN_CI // 10, pytest.param(IN_ALL // 10, marks=SLOW)])
def test_damaged_text_of_any_length_ends_in_text_or_errors(bases, tmp_path, n_mutants):
    """Such text lies in heaps, which have no checksums: it may come wrong, and its level has to say so."""
    tally = fuzz_and_show([base for base in bases if base.has_heap], n_mutants, tmp_path)
    assert_sound(tally)
    assert not tally.listed("wrong", level=3)


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n_mutants", [DIGESTS_IN_CI, pytest.param(DIGESTS_IN_ALL, marks=SLOW)])
@pytest.mark.parametrize("in_heaps", [False, True], ids=["numbers", "text of any length"])
def test_with_digests_no_damage_gives_wrong_values_in_any_format(tmp_path, n_mutants, in_heaps):
    bases = fuzzing.make_bases(tmp_path, digests=write_digests)
    n_mutants = n_mutants // 10 if in_heaps else n_mutants
    chosen = [base for base in bases if base.has_heap == in_heaps]
    tally = fuzz_and_show(chosen, n_mutants, tmp_path, verify="digest")
    assert_sound(tally)
    assert not tally.listed("wrong")
    assert not tally.of("moved"), "a chunk in another's place has another digest"


def write_digests(path):
    check_files(path, write_digests=True)
    return f"{path}.digests.json"


@pytest.mark.wide
def test_damaged_digests_are_refused_or_still_say_what_is_right(tmp_path):
    """The file is as it was: values that come are right, and no error is a stranger's."""
    base = some(fuzzing.make_bases(tmp_path, digests=write_digests), "gzip, latest")
    content, verdicts, n = base.digests, set(), len(base.digests)
    damaged = replace(base, content=content, chunks=[(0, n // 3), (n // 3, n // 3)], masks=[], tables=np.arange(n))
    for number in range(90):
        path = tmp_path / f"mutant{number}.h5"
        path.write_bytes(base.content)
        path.with_name(f"{path.name}.digests.json").write_bytes(fuzzing.mutant_of(damaged, number)[1])
        verdict, _, text = fuzzing.judge(base, number, str(path), {"verify": "digest"})
        assert verdict in ("right", "refused"), text
        verdicts.add(verdict)
    assert verdicts == {"right", "refused"}


# The fuzzer itself -----------------------------------------------------------------------------------------------


def some(bases, name):
    return next(base for base in bases if base.name == name)


def test_a_mutant_is_the_same_each_time_and_others_differ(bases):
    base = bases[0]
    made = [fuzzing.mutant_of(base, number) for number in range(100)]
    assert made == [fuzzing.mutant_of(base, number) for number in range(100)]
    assert len({content for _, content in made}) > 80
    assert {name for name, _ in made} == set(fuzzing.MUTATORS)


def test_each_mutator_meets_each_reader(bases):
    n = len(fuzzing.READERS) * 2 * len(fuzzing.MUTATORS)
    met = {(fuzzing.mutant_of(bases[0], number)[0], fuzzing.reader_of(number)) for number in range(n)}
    assert len(met) == len(fuzzing.MUTATORS) * len(fuzzing.READERS)


def test_bases_are_of_all_levels_and_small(bases):
    assert {min(base.levels) for base in bases} == {0, 1, 2, 3}
    assert all(10_000 < len(base.content) < 60_000 for base in bases)
    assert len(bases) >= 16


def test_places_of_filter_masks_are_found(bases, tmp_path):
    """Setting a bit there is what h5py reads as the chunk's mask, or what a checksum finds."""
    for base in bases:
        if not base.masks:
            continue
        path = tmp_path / f"{base.name}.h5"
        path.write_bytes(base.content)
        edit(path, base.masks[0], b"\x01\x00\x00\x00")
        if "latest" in base.name:
            with pytest.raises((OSError, RuntimeError)), h5py.File(path) as file:
                _ = [file[key][:] for key in "xy"]
        else:
            with h5py.File(path) as file:
                assert file["x"].id.get_chunk_info(0).filter_mask == 1


@pytest.mark.wide
@pytest.mark.parametrize(
    ("verdict", "judge"),
    [
        ("crash", lambda *_: os.abort()),
        ("hang", lambda *_: fuzzing.time.sleep(60)),
        ("foreign", lambda *_: ("foreign", None, "KeyError: 'x'")),
    ],
    ids=["crash", "hang", "foreign"],
)
def test_a_child_that_dies_or_hangs_costs_one_mutant(bases, tmp_path, monkeypatch, verdict, judge):
    sound = fuzzing.judge
    if verdict == "hang":  # a machine that is busy may add others
        monkeypatch.setattr(fuzzing, "HANG_SECONDS", 4)
    monkeypatch.setattr(fuzzing, "judge", lambda base, n, *more: (judge if n == 3 else sound)(base, n, *more))
    tally = fuzzing.fuzz([some(bases, "gzip, latest")], range(8), tmp_path)
    assert tally.of(verdict) == 1 or verdict == "hang"
    assert sum(tally.counts.values()) == 8
    assert 3 in [found[1] for found in tally.found if found[4] == verdict]
    assert not list(tmp_path.iterdir())


def test_wrong_values_are_seen(bases, tmp_path, monkeypatch):
    """A reader that takes what does not fit its checksum is caught at level 3."""
    ignore = lightning_h5.readers.chunk_loader.Pipeline.decode

    def decode(self, data, mask, out):
        try:
            ignore(self, data, mask, out)
        except Exception:
            out[:] = 0

    monkeypatch.setattr(lightning_h5.readers.chunk_loader.Pipeline, "decode", decode)
    monkeypatch.setattr("lightning_h5.readers.filters.pipeline.NativeDecoder", ())  # which would decode by itself
    tally = fuzzing.fuzz([some(bases, "shuffle + gzip + fletcher32, latest")], range(60), tmp_path)
    assert tally.listed("wrong", level=3)


def test_the_table_says_the_bound(bases, tmp_path):
    tally, table = fuzzing.timed_fuzz([some(bases, "gzip, latest")], range(10), tmp_path)
    assert "10 mutants of 1 files" in table
    assert "| 3.0e-01 |" in table
    assert json.dumps(sorted(tally.counts.values()))


def test_an_undamaged_base_is_right_by_all_readers(bases, tmp_path):
    for base in bases:
        path = tmp_path / f"{base.name}.h5"
        path.write_bytes(base.content)
        for turn in range(len(fuzzing.READERS)):
            number = turn * len(fuzzing.MUTATORS) * 2
            assert fuzzing.judge(base, number, str(path), {})[0] == "right", (base.name, fuzzing.reader_of(number))


def test_a_chunk_of_zeros_passes_a_bare_checksum_and_not_one_over_gzip(bases, tmp_path):
    """Why level 2 is not level 3."""
    for name, is_found in (("fletcher32, latest", False), ("shuffle + gzip + fletcher32, latest", True)):
        base, path = some(bases, name), tmp_path / f"{is_found}.h5"
        path.write_bytes(base.content)
        edit(path, base.chunks[0][0], bytes(base.chunks[0][1]))
        dataset = H5LazyDataset(path, "x", "y")
        if is_found:
            with pytest.raises(H5CorruptError, match="does not decode"):
                dataset[0]
        else:
            assert not np.asarray(dataset[0][0]).any()
