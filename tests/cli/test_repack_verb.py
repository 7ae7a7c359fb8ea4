"""``python -m lightning_h5 repack``."""

import json
import os
import stat

import h5py
import numpy as np
import pytest
from factories import Stored

from lightning_h5.cli import main


@pytest.fixture
def path(make_h5):
    x = Stored(np.arange(4000.0).reshape(1000, 4), "chunked", (100, 1), {"compression": "gzip"})
    return make_h5(
        {"x": x, "y": np.arange(1000), "text": Stored(np.array(["a"] * 3, object), dtype=h5py.string_dtype())}
    )


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["repack", *map(str, arguments)])
    return ended.value.code


def test_it_says_what_it_bought(path, capsys):
    assert run(path, path + ".copy", "--rows-per-chunk", 150, "--compression", "gzip", "--level", 9, "--verify") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0].split() == ["array", "chunks", "filters", "stored", "a", "row", "costs"]
    x = next(at for at, line in enumerate(lines) if line.startswith("x "))
    assert "100 x 1" in lines[x]
    assert "3.1 KiB" in lines[x]
    assert "150 x 4" in lines[x + 1]
    assert "4.7 KiB" in lines[x + 1]
    y = next(at for at, line in enumerate(lines) if line.startswith("y "))
    assert lines[y + 1].split()[:2] == ["1000", "gzip"]
    assert "text is variable-length, which HDF5 cannot compress, and is copied unchanged" in printed.out
    assert "MiB/s of decoded data; verified in" in lines[-2]
    assert lines[-1] == f"Next: lightning-h5 inspect {path}.copy"
    with h5py.File(path + ".copy") as file:
        assert (file["x"].chunks, file["x"].compression_opts) == ((150, 4), 9)


def test_json_has_all_of_it_and_nothing_else_is_written(path, capsys):
    assert run(path, path + ".copy", "--compression", "lzf", "--shuffle-filter", "--checksum", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    x = next(array for array in report["arrays"] if array["name"] == "x")
    assert x["before"]["chunks"] == [100, 1]
    assert x["after"]["chunks"] == [1000, 4]
    assert x["after"]["filters"] == ["shuffle", "lzf", "fletcher32"]
    assert x["before"]["row_cost"] == 3200
    assert report["n_bytes_after"] == os.path.getsize(path + ".copy")
    assert report["verify_seconds"] is None


def test_rows_are_shuffled_by_name(path, capsys):
    assert run(path, path + ".copy", "--shuffle-rows", 3) == 1
    assert "Name the arrays that belong together" in capsys.readouterr().err
    assert run(path, path + ".copy", "--shuffle-rows", 3, "--shuffle-keys", "x", "y", "--keys", "x") == 0
    assert "x (rows shuffled)" in capsys.readouterr().out
    with h5py.File(path + ".copy") as file:
        assert np.array_equal(file["x"][:, 0], 4 * file["y"][:])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--rows-per-chunk", "0"], 2, "'0' is not a number of rows"),
        (["--rows-per-chunk", "many"], 2, "'many' is not a number of rows"),
        (["--compression", "zipp"], 2, "invalid choice: 'zipp'"),
        (["--compression", "gzip", "--level", "12"], 1, "has 1 to 9"),
        (["--keys", "X"], 1, "Did you mean 'x'"),
        (["--shuffle-keys", "x"], 1, "without shuffle_rows"),
    ],
)
def test_what_cannot_be_is_one_line(path, tmp_path, capsys, arguments, code, text):
    assert run(path, path + ".copy", *arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert text in printed.err
    assert code == 2 or printed.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["data1.h5"]


def test_an_existing_file_is_never_written_over(path, capsys, tmp_path):
    target = tmp_path / "there"
    target.write_text("mine")
    before = _looks(path)
    assert run(path, target) == 1
    assert "cannot be written: it exists" in capsys.readouterr().err
    assert run(path, path) == 1
    assert "is the file to be repacked" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert _looks(path) == before


def test_the_copy_can_be_read_by_whom_new_files_can(path, tmp_path, capsys):
    mask = os.umask(0o027)
    try:
        assert run(path, tmp_path / "copy.h5") == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(tmp_path / "copy.h5").st_mode) == 0o640


@pytest.mark.parametrize(
    ("shape", "chunk", "option"),
    [((1 << 30,), 1 << 20, "--trusted"), ((1 << 28,), (1 << 27) + 1, "--trusted")],
)
def test_what_claims_too_much_passes_with_leave_alone(path, capsys, shape, chunk, option):
    with h5py.File(path, "a") as file:
        file.create_dataset("huge", shape, "i8", chunks=(chunk,))
    assert run(path, path + ".copy") == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"{option[2:].replace('-', '_')}=True" in printed.err
    assert not os.path.exists(path + ".copy")
    assert run(path, path + ".copy", option) == 0
    with h5py.File(path + ".copy") as file:
        assert file["huge"].shape == shape


def test_the_help_lists_the_compressions(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "zstd" in text
    assert "lightning-h5 repack data.h5" in text


def _looks(path):
    """What changes where a file is written to or replaced."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode
