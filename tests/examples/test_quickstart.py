"""The quick start, from Python and from YAML, as a newcomer runs them."""

import re
from pathlib import Path

import h5py
import pytest
from scripts import as_commands, fork, run_forked, run_script

ROOT = Path(__file__).parents[2]
WAYS = ["forked", pytest.param("alone", marks=pytest.mark.slow)]


def clone_in(folder):
    """A folder like a fresh clone: the package and the examples, and no data yet."""
    (folder / "examples").mkdir()
    for name in ("quickstart.py", "quickstart.yaml"):
        (folder / "examples" / name).write_text((ROOT / "examples" / name).read_text())
    (folder / "lightning_h5").symlink_to(ROOT / "lightning_h5")
    return folder


@pytest.fixture(scope="module", params=WAYS)
def clone_and_output(request, tmp_path_factory):
    """A clone in which the script has run, and what that printed."""
    clone = clone_in(tmp_path_factory.mktemp("clone"))
    script = clone / "examples" / "quickstart.py"
    if request.param == "alone":
        return clone, run_script(script, cwd=clone, PYTHONPATH=str(clone))
    return clone, run_forked(clone / "logs", script, cwd=str(clone))


def test_the_script_writes_trains_tests_and_predicts(clone_and_output):
    out = clone_and_output[1]
    accuracy = float(re.search(r"accuracy on the test rows: ([\d.]+)", out)[1])
    assert accuracy >= 0.95
    assert "1797 rows predicted" in out
    for stage in ("train", "validate", "test", "predict"):
        assert re.search(rf"^ .* {stage}\b", out, re.MULTILINE), "the table has a column for each stage"


def test_the_file_lies_as_people_find_them(clone_and_output):
    with h5py.File(clone_and_output[0] / "examples" / "data" / "digits.h5") as file:
        images, labels, writer = (file[f"scans/{name}"] for name in ("images", "labels", "writer"))
        assert (images.shape, images.chunks, images.compression) == ((1797, 1, 8, 8), (64, 1, 8, 8), "gzip")
        assert labels.dtype.kind == "i"
        assert h5py.check_string_dtype(writer.dtype).length is None


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
def test_the_config_trains_and_tests_the_same_from_the_command_line(tmp_path, way):
    def run(verb, *more):
        command = [verb, "--config", "examples/quickstart.yaml", *more]
        if way == "alone":
            return run_script("-m", "lightning_h5", *command, cwd=clone, PYTHONPATH=str(clone))
        return fork(clone / "logs", as_commands, str(clone), [("", command)])

    clone = clone_in(tmp_path)
    run("fit")
    checkpoint = next((clone / "checkpoints").glob("*.ckpt"))
    out = run("test", "--ckpt_path", str(checkpoint))
    assert float(re.search(r"test/accuracy\D+([\d.]+)", out)[1]) >= 0.95
