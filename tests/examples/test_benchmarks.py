"""The benchmarks, over so few rows that nothing is measured: they run to the end and say what they should.

Each checks what every contender gives before it times it, so that a run that ends has seen all rows right. They run in
processes forked from one that has imported much, but for one, which starts as a user starts it; ``-m slow`` starts all
of them so.
"""

import importlib.util
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from scripts import run_forked, run_script

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "examples" / "benchmarks"
PEERS = {"spdl": "compressed", "insitubatch": "compressed", "litdata": "converted"}


@pytest.fixture
def run_alone(tmp_path):
    return partial(run_script, PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))


@pytest.fixture(params=["forked", pytest.param("alone", marks=pytest.mark.slow)])
def run(request, tmp_path, run_alone):
    return partial(run_forked, tmp_path / "logs", TMPDIR=str(tmp_path)) if request.param == "forked" else run_alone


def names_of(result):
    return {each["name"] for each in result["contenders"]}


def test_contiguous_arrays(run, tmp_path):
    out = run(BENCHMARKS / "contiguous.py", "--rows", 128, "--rounds", 1, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert [result["case"]["name"] for result in written["results"]] == ["images", "signals"]
    for result in written["results"]:
        assert len(result["rows_per_second"]) == 7
        assert len(result["ratios"]) == 5
    assert out.count("lightning_h5 / plain h5py") == 2


@pytest.mark.wide
def test_chunked_arrays(run, tmp_path):
    cases = ["images-gzip-32", "images-chunked-32", "images-guess", "signals-gzip-32", "signals-contiguous"]
    wanted = ["--rows", 150, "--rounds", 1, "--peers", "--json", tmp_path / "out.json", "--cases", *cases]
    run(BENCHMARKS / "compressed.py", *wanted)
    written = json.loads((tmp_path / "out.json").read_text())
    results = {result["case"]: result for result in written["results"]}
    assert sorted(results) == sorted(cases)
    chunked, contiguous = names_of(results["images-gzip-32"]), names_of(results["signals-contiguous"])
    assert {"lightning_h5, first epoch", "lightning_h5, tenth epoch on", "index_select in memory"} <= chunked
    assert "bare decode loop, 2 threads" in chunked
    assert {"lightning_h5, mmap", "lightning_h5, chunks", "bare preadv, one buffer"} <= contiguous
    assert 1.3 < results["images-gzip-32"]["compression_ratio"] < 2
    assert results["signals-contiguous"]["compression_ratio"] == 1
    assert not list(tmp_path.glob("tmp*")), "nothing is left of the files"


@pytest.mark.slow
def test_cold_files(run_alone, tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    wanted = ["--gib", 0.01, "--seconds", 0.1, "--rounds", 1, "--cases", "contiguous 4 ", "gzip", "--json", out]
    run_alone(BENCHMARKS / "cold.py", *wanted, "--page", page)
    results = {result["case"]: result for result in json.loads(out.read_text())["results"]}
    assert [*results] == ["contiguous 4 KiB", "contiguous 4 KiB, busy disk", "gzip 256 KiB, 4 KiB"]
    for result in results.values():
        assert min(result["samples_per_second"].values()) > 0
        assert result["ratios"]
    assert "| contiguous 4 KiB |" in page.read_text()


@pytest.mark.slow
def test_shards_in_memory(run_alone, tmp_path):
    """As a user starts it: its ranks come from a server of processes."""
    run_alone(BENCHMARKS / "cached.py", "--rows", 150, "--rounds", 1, "--json", tmp_path / "out.json")
    *compressed, table = json.loads((tmp_path / "out.json").read_text())["results"]
    served = ["lightning_h5, 64 / index_select, 64", "lightning_h5, 1024 / index_select, 1024"]
    for result in compressed:
        assert [each["name"] for each in result["loading"]["ratios"]] == [
            "lightning_h5 / array[a:b] of h5py",
            "lightning_h5 / bare decode loop",
            "interleave / contiguous, on two ranks",
        ]
        assert [each["name"] for each in result["batches"]["ratios"]][:2] == served
        assert result["mib_beside_the_shard"].keys() == {"as stored", "float32"}
    assert [each["name"] for each in table["batches"]["ratios"]] == served


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_many_files_and_filters(run, tmp_path):
    few = ["--rows", 150, "--filter-rows", 2000, "--files", 4, "--epochs", 2, "--rounds", 1]
    run(BENCHMARKS / "combined.py", *few, "--workers", 2, "--warm", 1, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert [len(result["fields"]) for result in written["table"]] == [11] * 4 + [5] * 4
    for result in written["table"]:
        assert [ratio["target"] for ratio in result["ratios"]] == [3, None]
        assert {each["team"] for each in result["contenders"]} >= {"lightning_h5", "the original approach"}
    assert [line["unit"] for line in written["lines"][:3]] == ["MiB", "MiB an epoch", ""]
    assert [line["target"] for line in written["lines"][3:]] == [2, None, 2, None, None, 0.8, None, 0.8]
    assert not list(tmp_path.glob("tmp*")), "nothing is left of the files"


@pytest.mark.wide
def test_studies(run, tmp_path):
    few = ["--rows", 640, "--rounds", 1, "--steps", 100]
    assert "three compressed sources" in run(BENCHMARKS / "studies.py", *few, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["normalize"]) == 6
    assert all(max(case["bucketed"]) < 0.05 < 0.4 < case["plain"] for case in written["lengths"])
    assert written["mixtures"]["shares"] == {"a": 60, "b": 30, "c": 10}


@pytest.mark.wide
def test_batches_of_sequences(run, tmp_path):
    run(BENCHMARKS / "tokens.py", "--samples", 400, "--rounds", 1, "--json", tmp_path / "out.json")
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [*results] == ["proteins", "recordings"]
    for way, max_tokens in zip(results.values(), (16_384, 65_536), strict=True):
        plain, bucket, tokens, packed = way.values()
        assert plain["padding"] > 0.4 > bucket["padding"] > packed["padding"] == 0
        assert plain["most"] > max_tokens >= max(tokens["most"], packed["most"])
        assert packed["batches"] <= tokens["batches"]


@pytest.mark.wide
def test_ends_of_epochs(run, tmp_path):
    few = ["--images", 1280, "--step-ms", 1, "--epochs", 2, "--rounds", 1, "--buffer", "4 MiB"]
    out = run(BENCHMARKS / "epoch_ends.py", *few, "--workers", 0, 1, "--json", tmp_path / "out.json")
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    ways = [(result["workers"], result["way"]) for result in results]
    assert ways == [(n, way) for n in (0, 1) for way in ("read ahead", "each epoch from its start")]
    assert all(result["gap_longest"] >= result["gap_median"] > 0 for result in results)
    assert out.count("asked at most 2.0") == 2


@pytest.mark.slow
def test_the_limits_do_without_fast_decoders(run_alone):
    program = f"""
import runpy, sys
sys.modules.update(dict.fromkeys(("imagecodecs", "zlib_into")))
sys.path.insert(0, {str(BENCHMARKS)!r})
sys.argv = "compressed --rows 150 --rounds 1 --peers --cases images-lzf-1 signals-gzip-32".split()
runpy.run_path({str(BENCHMARKS / "compressed.py")!r}, run_name="__main__")
"""
    assert run_alone("-c", program).count("bare decode loop, 2 threads") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "script"), PEERS.items())
def test_a_peer_gives_each_row_once_and_as_written(run_alone, peer, script, tmp_path):
    if importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    chosen = ["--cases", "images-gzip-32", "signals-gzip-32"] if script == "compressed" else []
    wanted = ["--rows", 320, "--rounds", 1, "--peers", peer, "--json", tmp_path / "out.json", *chosen]
    run_alone(BENCHMARKS / f"{script}.py", *wanted)
    written = json.loads((tmp_path / "out.json").read_text())
    if written["skipped"]:
        pytest.skip(written["skipped"][peer])
    assert all(any(peer in name.lower() for name in names_of(result)) for result in written["results"])


def test_a_peer_that_does_not_import_is_skipped_with_a_line(run, tmp_path):
    program = f"""
import runpy, sys
sys.modules["insitubatch"] = None
sys.path.insert(0, {str(BENCHMARKS)!r})
sys.argv = "compressed --rows 150 --rounds 1 --peers insitubatch --cases signals-contiguous".split()
runpy.run_path({str(BENCHMARKS / "compressed.py")!r}, run_name="__main__")
"""
    (tmp_path / "program.py").write_text(program)
    out = run(tmp_path / "program.py")
    assert re.search(r"skipped: insitubatch, which cannot be imported \(ModuleNotFoundError", out)


def test_results_of_other_cases_stay_in_the_file(run, tmp_path):
    for case in ("images-contiguous", "signals-contiguous"):
        wanted = ["--rows", 128, "--rounds", 1, "--peers", "--json", tmp_path / "out.json", "--cases", case]
        run(BENCHMARKS / "compressed.py", *wanted)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["case"] for result in results] == ["images-contiguous", "signals-contiguous"]


@pytest.mark.slow
def test_windows(run_alone, tmp_path):
    wanted = ["--cases", "sensors", "--rounds", 1, "--peers", "--json", tmp_path / "out.json"]
    run_alone(BENCHMARKS / "windows.py", *wanted)
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {"plain h5py, 2 workers", "lightning_h5", "bare decode loop"} <= names_of(result)


@pytest.mark.slow
def test_cells(run_alone, tmp_path):
    wanted = ["--cells", 2000, "--genes", 500, "--rounds", 1, "--json", tmp_path / "out.json"]
    run_alone(BENCHMARKS / "cells.py", *wanted)
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {"plain h5py, 0 workers", "lightning_h5, dense", "lightning_h5, CSR"} <= names_of(result)


@pytest.mark.slow
def test_the_cost_of_loading(run_alone, tmp_path):
    run_alone(BENCHMARKS / "loader_cost.py", "--trainings", "tokens", "--rounds", 1, "--json", tmp_path / "out.json")
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["stored_share"] > 0
    assert {way: len(steps) for way, steps in result["step_ms"].items()} == {"stored": 1, "decoded": 1, "held": 1}


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_training(run, tmp_path):
    few = ["--rows", 128, "--epochs", 4, "--chunks", 300, "--times", 2]
    out = run(BENCHMARKS / "training.py", *few, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert {line["unit"] for line in written["results"]} >= {"% of the time", "MiB", "MiB an epoch", "ratio", "s"}
    assert "opening 300 chunks" in out


@pytest.mark.slow
def test_kinds_of_samples(run_alone):
    kinds = ["windows in memory", "sparse rows"]
    out = run_alone(BENCHMARKS / "samples.py", "--rounds", 1, "--seconds", 0.01, "--against", ROOT, "--kinds", *kinds)
    assert all(re.search(rf"^{kind} +[\d,]+ samples a CPU second +[\d.]+ x$", out, re.MULTILINE) for kind in kinds)


def test_plan(run):
    out = run(BENCHMARKS / "plan.py", "--rows", 10**5, "--blocks", 1000)
    assert re.search(r"^ *global ", out, re.MULTILINE)


def test_repacking(run, tmp_path):
    out = run(BENCHMARKS / "repack.py", "--gib", 0.004, "--rounds", 1, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["is_equal"]
    assert written["ratio"] > 0
    assert "copy and original are equal: True" in out


def test_monitoring(run, tmp_path):
    out = run(BENCHMARKS / "monitor.py", "--batches", 20, "--rounds", 1, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert {name: len(seconds) for name, seconds in written["seconds"].items()} == {"without": 1, "with": 1}
    assert "as a share of the time at 500 batches a second" in out


def test_layouts(run, tmp_path):
    parts = ROOT / "docs" / "_parts"
    (tmp_path / "layouts.json").write_text((parts / "layouts.json").read_text())
    run(BENCHMARKS / "layouts.py", tmp_path)
    for name in ("chunk_cost.html", "layouts.md"):
        assert (tmp_path / name).read_text() == (parts / name).read_text()


@pytest.mark.wide
def test_what_a_conversion_gives(run, tmp_path):
    run(BENCHMARKS / "converted.py", "--rows", 256, "--rounds", 1, "--peers", "--json", tmp_path / "out.json")
    for result in json.loads((tmp_path / "out.json").read_text())["results"]:
        ways = {each["name"]: each for each in result["contenders"]}
        assert len(ways) == 8
        assert ways["lightning_h5, repacked, contiguous, mmap"]["bytes"] > ways["lightning_h5, as stored"]["bytes"]
        assert ways["lightning_h5, decoded store"]["bytes"] > 0


@pytest.mark.slow
def test_what_limits_reading(run_alone, tmp_path):
    run_alone(BENCHMARKS / "limits.py", "--rows", 7000, "--rounds", 1, "--json", tmp_path / "out.json")
    for found in json.loads((tmp_path / "out.json").read_text())["results"].values():
        assert 0 < found["copying rows"] < found["decoding"] < found["processor"]


@pytest.mark.slow
def test_more_cores_than_there_are(run_alone, tmp_path):
    options = ["--cores", 1, 8, "--rounds", 1, "--mib", 256, "--cases", "images", "--json", tmp_path / "out.json"]
    run_alone(BENCHMARKS / "cost_model.py", *options)
    images = json.loads((tmp_path / "out.json").read_text())["results"]["images"]
    assert 1.5 * images["simulated"]["1"] < images["simulated"]["8"]


@pytest.mark.slow
def test_the_start_of_training(run_alone, tmp_path):
    run_alone(BENCHMARKS / "start.py", "--rounds", 1, "--json", tmp_path / "out.json")
    assert set(json.loads((tmp_path / "out.json").read_text())["more"]) == {"import", "first batch"}


@pytest.mark.wide
def test_very_many_segments(run, tmp_path):
    out = run(BENCHMARKS / "scale.py", "--segments", 40, "--files", 8, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert {kind: one["segments"] for kind, one in written.items()} == {"groups": 40, "arrays": 40, "files": 8}
    assert all(one[name] > 0 for one in written.values() for name in ("ratio", "again", "bytes"))
    assert out.count("B/segment") == 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it asks for the memory that is no file's")
def test_what_grows(run_alone, tmp_path):
    few = ["--most", 100, "--seconds", 0.1, "--kinds", "files of 20 rows", "ranks"]
    out = run_alone(BENCHMARKS / "growth.py", *few, "--json", tmp_path / "out.json", "--page", tmp_path / "page.md")
    written = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(one["kind"], one["n"]) for one in written] == [("files of 20 rows", 100), ("ranks", 1), ("ranks", 64)]
    assert all(one[name] > 0 for one in written for name in ("h5py", "setup", "first_batch", "first_epoch"))
    assert "64 ranks" in out
    assert len(re.findall(r"^\| ", (tmp_path / "page.md").read_text(), re.M)) == 1 + 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it asks for the processor time of other processes")
def test_the_transport_of_batches(run_alone, tmp_path):
    few = ["--seconds", 0.01, "--rounds", 1, "--sizes", "600 KiB", "--milliseconds", 0, "--deaths", 1]
    out = run_alone(BENCHMARKS / "transport.py", *few, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    (result,) = written["results"]
    assert all(result[f"{way} / own, {time}"] > 0 for way in ("packed", "queue") for time in ("clock", "processor"))
    ((seconds, is_requested),) = written["deaths"]["own"]
    assert seconds < 5
    assert is_requested
    assert "own: 1 of 1 killed workers were noticed" in out


@pytest.mark.slow
def test_slow_file_systems(run_alone, tmp_path):
    """As a user starts it: its file system is served by a process that is spawned."""
    wanted = ["--rows", 640, "--epochs", 3, "--delay", 1, "--json", tmp_path / "out.json", "--layouts", "gzip"]
    out = run_alone(BENCHMARKS / "staging.py", *wanted)
    if "skipped: a FUSE file system cannot be mounted here" in out:
        pytest.skip("mounting takes root")
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    first, *later = result["requests"]["mirror"]
    assert first > 0
    assert not any(later)
    assert out.count("mirror / local") == 1
