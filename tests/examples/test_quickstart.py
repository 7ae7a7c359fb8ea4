"""The quick start, from Python and from YAML, as a newcomer runs them."""

import re
from pathlib import Path

import h5py
import pytest
from scripts import run_script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path):
    """A folder like a fresh clone: the package and the examples, and no data yet."""
    (tmp_path / "examples").mkdir()
    for name in ("quickstart.py", "quickstart.yaml"):
        (tmp_path / "examples" / name).write_text((ROOT / "examples" / name).read_text())
    (tmp_path / "lightning_h5").symlink_to(ROOT / "lightning_h5")
    return tmp_path


def run(clone, *arguments):
    return run_script(*arguments, cwd=clone, PYTHONPATH=str(clone))


def test_the_script_writes_trains_tests_and_predicts(clone):
    out = run(clone, "examples/quickstart.py")
    accuracy = float(re.search(r"accuracy on the test rows: ([\d.]+)", out)[1])
    assert accuracy >= 0.95
    assert "1797 rows predicted" in out
    for stage in ("train", "validate", "test", "predict"):
        assert re.search(rf"^{stage} +\d", out, re.MULTILINE), "the table has a line for each stage"


def test_the_file_lies_as_people_find_them(clone):
    run(clone, "-c", "import sys; sys.path.insert(0, 'examples'); import quickstart; quickstart.write_digits()")
    with h5py.File(clone / "examples" / "data" / "digits.h5") as file:
        images, labels, writer = (file[f"scans/{name}"] for name in ("images", "labels", "writer"))
        assert (images.shape, images.chunks, images.compression) == ((1797, 1, 8, 8), (64, 1, 8, 8), "gzip")
        assert labels.dtype.kind == "i"
        assert h5py.check_string_dtype(writer.dtype).length is None


def test_the_config_trains_and_tests_the_same_from_the_command_line(clone):
    config = ["--config", "examples/quickstart.yaml"]
    run(clone, "-m", "lightning_h5", "fit", *config)
    checkpoint = next((clone / "checkpoints").glob("*.ckpt"))
    out = run(clone, "-m", "lightning_h5", "test", *config, "--ckpt_path", str(checkpoint))
    assert float(re.search(r"test/accuracy\D+([\d.]+)", out)[1]) >= 0.95
