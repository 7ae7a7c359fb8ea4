"""Rows that come as often as their class or weight asks for, under the Trainer: shares, resuming, what is refused."""

import h5py
import numpy as np
import pytest
import torch
from arguments import nested
from factories import Stored
from lightning.pytorch.cli import LightningCLI
from lightning_models import Recorder, SaveOnException, quiet_trainer, together

from lightning_h5 import CombinedHDF5DataModule, H5ResumeError, H5ValueError, LazyH5DataModule, RankCachedH5DataModule

ROWS, BATCH = 1200, 32
KINDS = {"lazy": LazyH5DataModule, "combined": CombinedHDF5DataModule, "rank_cached": RankCachedH5DataModule}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SHUFFLES = {"global": {}, "chunks": {"shuffle": "chunks", "shuffle_bytes": "4 KiB"}, "storage": {"shuffle": False}}
EVERY_SHUFFLE = pytest.mark.parametrize("shuffle", SHUFFLES)


def arrays():
    """One row in ten is of class 1, one in fifty of class 2."""
    random = np.random.default_rng(0)
    labels = np.select([random.random(ROWS) < 0.02, random.random(ROWS) < 0.1], [2, 1], 0)
    return {
        "x": Stored(np.arange(ROWS * 4, dtype="f4").reshape(ROWS, 4), "chunked", (16, 4), {"compression": "gzip"}),
        "y": labels,
        "w": random.random(ROWS) * (random.random(ROWS) < 0.8),
        "row": np.arange(ROWS),
        "name": np.array([b"none", b"some", b"rare"])[labels],
    }


@pytest.fixture
def file(make_h5):
    return make_h5(arrays())


LABELS, WEIGHTS = arrays()["y"], arrays()["w"]


def module(kind, file, **options):
    options = {"batch_size": BATCH, "with_index": True} | options
    if kind != "combined":
        return KINDS[kind](file, **nested(**({"x_key": {"x": "x", "row": "row"}} | options)))
    return CombinedHDF5DataModule(file, **nested(**({"fields": ["x", "row"]} | options)))


class RowRecorder(Recorder):
    """Remembers rows, and looks that each sample is whole."""

    def training_step(self, batch, batch_idx):
        assert batch["x"][:, 0].tolist() == (4 * batch["row"]).tolist()
        assert batch["index"].max() < ROWS
        return super().training_step({"index": batch["row"]}, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step({"index": batch["row"]}, batch_idx)

    def test_step(self, batch, batch_idx):
        super().test_step({"index": batch["row"]}, batch_idx)


def trained(datamodule, **options):
    """Rows of each epoch."""
    model = RowRecorder()
    quiet_trainer(**options).fit(model, datamodule=datamodule)
    return list(model.train_rows.values())


def shares(rows, n=3):
    return np.bincount(LABELS[rows], minlength=n) / len(rows)


@EVERY_KIND
@EVERY_SHUFFLE
def test_balanced_classes_come_equally_often_and_all_rows_of_one_about_as_often(file, kind, shuffle):
    for rows in trained(module(kind, file, weights={"balance_key": "y"}, **SHUFFLES[shuffle])):
        assert len(rows) == ROWS
        assert np.abs(shares(rows) - 1 / 3).max() < 0.02
        counts, expected = np.bincount(rows, minlength=ROWS), ROWS / 3 / np.bincount(LABELS)[LABELS]
        assert (counts >= np.floor(expected) - 1).all()
        assert (counts <= np.ceil(expected) + 1).all()


@EVERY_KIND
def test_epochs_draw_other_rows_in_another_order(file, kind):
    first, second = trained(module(kind, file, weights={"balance_key": "y"}))
    assert sorted(first) != sorted(second)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 0.1 * ROWS


@EVERY_KIND
@pytest.mark.parametrize("weights", [{0: 1, 1: 1, 2: 2}, {"0": 1.0, "1": 0, "2": 3.0}], ids=["numbers", "texts"])
def test_classes_come_as_often_as_class_weights_say(file, kind, weights):
    wanted = np.array([float(weight) for weight in weights.values()])
    for rows in trained(module(kind, file, weights={"balance_key": "y", "class_weights": weights})):
        assert np.abs(shares(rows) - wanted / wanted.sum()).max() < 0.02
        assert shares(rows)[wanted == 0].sum() == 0


@EVERY_KIND
def test_classes_may_be_text(file, kind):
    weights = {"none": 1, "some": 2, "rare": 1}
    (rows, _) = trained(module(kind, file, weights={"balance_key": "name", "class_weights": weights}))
    assert np.abs(shares(rows) - [0.25, 0.5, 0.25]).max() < 0.02


@EVERY_KIND
@EVERY_SHUFFLE
def test_rows_come_as_often_as_a_column_of_weights_says(file, kind, shuffle):
    expected = WEIGHTS / WEIGHTS.sum() * ROWS
    for rows in trained(module(kind, file, weights="w", **SHUFFLES[shuffle])):
        counts = np.bincount(rows, minlength=ROWS)
        assert len(rows) == ROWS
        assert not counts[WEIGHTS == 0].any()
        assert (np.abs(counts - expected) < 2).all()


@EVERY_KIND
def test_weights_are_of_the_training_rows_of_a_split_and_evaluation_has_each_row_once(file, kind):
    datamodule, model = (
        module(kind, file, weights={"balance_key": "y"}, split={"val_fraction": 0.2, "test_fraction": 0.1}),
        RowRecorder(),
    )
    quiet_trainer(num_sanity_val_steps=0).fit(model, datamodule=datamodule)
    quiet_trainer().test(model, datamodule=datamodule, verbose=False)
    train, val, test = {*model.train_rows[0], *model.train_rows[1]}, model.rows["val"], model.rows["test"]
    assert sorted(val) == sorted([*set(val)] * 2)
    assert (len(set(val)), len(test), len(set(test))) == (240, 120, 120)
    assert not train & {*val, *test}
    for rows in model.train_rows.values():
        assert len(rows) == ROWS - 360
        assert np.abs(shares(rows) - 1 / 3).max() < 0.02


def test_classes_are_balanced_among_the_rows_that_pass_filters_and_over_all_sources(file):
    sources = {"all": file, "ones": {"paths": file, "where": {"y": 1}}}
    datamodule = CombinedHDF5DataModule(
        mixture=sources, fields=["row", "y"], weights={"balance_key": "y"}, batch_size=BATCH
    )
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    labels = torch.cat([batch["y"] for batch in batches]).numpy()
    names = [name for batch in batches for name in batch["source"]]
    assert len(labels) == ROWS + (LABELS == 1).sum()
    assert np.abs(np.bincount(labels) / len(labels) - 1 / 3).max() < 0.02
    of_ones = labels[np.array(names) == "ones"]
    assert (of_ones == 1).all()
    assert abs(len(of_ones) / (labels == 1).sum() - 0.5) < 0.1


@EVERY_KIND
def test_a_config_can_say_it(file, tmp_path, kind):
    config = tmp_path / "config.yaml"
    config.write_text(f"""
seed_everything: 3
trainer: {{accelerator: cpu, logger: false}}
model: {{class_path: lightning_models.Recorder}}
data:
  class_path: lightning_h5.{KINDS[kind].__name__}
  init_args:
    train_path: {file}
    {"fields: [row]" if kind == "combined" else "x_key: {row: row}"}
    weights: {{balance_key: y, class_weights: {{0: 1, 1: 2, 2: 1.0}}}}
""")
    cli = LightningCLI(args=["--config", str(config)], run=False, save_config_callback=None)
    cli.datamodule.setup("fit")
    rows = np.concatenate([batch["row"].numpy() for batch in cli.datamodule.train_dataloader()])
    assert np.abs(shares(rows) - [0.25, 0.5, 0.25]).max() < 0.02


def test_a_key_may_have_another_name_in_the_files(file):
    datamodule = module(
        "combined", file, fields={"x": "x", "row": "row", "label": "y"}, weights={"balance_key": "label"}
    )
    assert np.abs(shares(trained(datamodule)[0]) - 1 / 3).max() < 0.02


def test_a_key_may_be_that_of_each_split(make_h5):
    given = arrays()
    path = make_h5({f"train/{name}": values for name, values in given.items()})
    keys = {"x_key": {"x": "{split}/x", "row": "{split}/row"}, "balance_key": "{split}/y"}
    assert np.abs(shares(trained(module("lazy", path, **keys))[0]) - 1 / 3).max() < 0.02


def test_an_input_and_a_target_come_as_they_do_without_weights(file):
    datamodule = LazyH5DataModule(
        file, x_key="x", y_key="y", weights={"balance_key": "y"}, batch_size=BATCH, with_index=True
    )
    datamodule.setup("fit")
    labels = []
    for x, y, index in datamodule.train_dataloader():
        assert torch.equal(x[:, 0].long(), 4 * index)
        assert y.tolist() == LABELS[index.numpy()].tolist()
        labels += y.tolist()
    assert np.abs(np.bincount(labels) / ROWS - 1 / 3).max() < 0.02


@EVERY_SHUFFLE
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_have_the_sequence_of_one(file, world_size, shuffle):
    def steps(rank, world_size):
        options = {"streams": 1, **SHUFFLES[shuffle]}
        datamodule = module("lazy", file, weights={"balance_key": "y"}, rank=rank, world_size=world_size, **options)
        datamodule.setup("fit")
        return [batch["row"].tolist() for batch in datamodule.train_dataloader()]

    alone = [row for batch in steps(0, 1) for row in batch]
    ranks = [steps(rank, world_size) for rank in range(world_size)]
    assert [row for step in zip(*ranks, strict=True) for batch in step for row in batch] == alone


def test_each_rank_that_holds_its_rows_draws_among_them(file):
    drawn = []
    for rank in range(2):
        datamodule = module("rank_cached", file, weights={"balance_key": "y"}, rank=rank, world_size=2)
        datamodule.setup("fit")
        drawn.append(np.concatenate([batch["row"].numpy() for batch in datamodule.train_dataloader()]))
    for rank, rows in enumerate(drawn):
        assert (rows % 2 == rank).all()
        assert len(rows) == ROWS // 2
    expected = ROWS / 2 * (1 / np.bincount(LABELS))[LABELS]
    for rank, rows in enumerate(drawn):
        own = np.where(np.arange(ROWS) % 2 == rank, expected, 0)
        assert np.abs(np.bincount(rows, minlength=ROWS) - own / own.sum() * ROWS / 2).max() < 2


def test_a_rank_without_a_row_that_has_a_weight_is_refused_on_all_ranks(make_h5):
    path = make_h5({"x": np.arange(100.0), "w": (np.arange(100) < 50).astype("f4")})
    for rank in range(2):
        options = {"rank": rank, "world_size": 2}
        datamodule = RankCachedH5DataModule(path, x_key="x", weights="w", memory="contiguous", distributed=options)
        with pytest.raises(H5ValueError, match=r"all rows that rank 1 of 2 holds have the weight 0"):
            datamodule.setup("fit")


@pytest.mark.wide
@EVERY_KIND
@EVERY_SHUFFLE
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_stopped_in_the_middle_of_an_epoch_goes_on_exactly(file, tmp_path, kind, shuffle, num_workers):
    def data():
        return module(kind, file, weights={"balance_key": "y"}, num_workers=num_workers, **SHUFFLES[shuffle])

    whole, broken, resumed = RowRecorder(), RowRecorder(fail_at=(1, 5)), RowRecorder()
    quiet_trainer().fit(whole, datamodule=data())
    saving = SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[saving]).fit(broken, datamodule=data())
    quiet_trainer().fit(resumed, datamodule=data(), ckpt_path=saving.path)
    assert together(broken.train_rows, resumed.train_rows) == whole.train_rows


OTHERS = {
    "other class weights": {"balance_key": "y", "class_weights": {0: 1, 1: 1, 2: 2}},
    "another column": {"weight_key": "w"},
    "no weights": {},
}


@pytest.mark.parametrize("other", OTHERS)
def test_going_on_with_other_weights_is_refused(file, tmp_path, other):
    saving = SaveOnException(tmp_path)
    with pytest.raises(RuntimeError, match="stop here"):
        quiet_trainer(callbacks=[saving]).fit(
            RowRecorder(fail_at=(1, 5)), datamodule=module("lazy", file, weights={"balance_key": "y"})
        )
    with pytest.raises(H5ResumeError):
        quiet_trainer().fit(RowRecorder(), datamodule=module("lazy", file, **OTHERS[other]), ckpt_path=saving.path)


def noise(sample, rng):
    return sample | {"noise": rng.normal()}


@EVERY_KIND
def test_a_transform_draws_anew_for_a_row_that_comes_again_and_the_same_with_workers(file, kind):
    drawn = []
    for num_workers in (0, 2):
        datamodule = module(kind, file, weights={"balance_key": "y"}, transform=noise, num_workers=num_workers)
        datamodule.setup("fit")
        batches = list(datamodule.train_dataloader())
        rows = np.concatenate([batch["row"].numpy() for batch in batches])
        values = np.concatenate([batch["noise"].numpy() for batch in batches])
        assert len(np.unique(rows)) < 0.8 * ROWS
        assert len(np.unique(values)) == ROWS
        assert all(batch["index"].tolist() == batch["row"].tolist() for batch in batches)
        drawn.append((rows.tolist(), values.tolist()))
        datamodule.teardown()
    assert drawn[0] == drawn[1]


def of_samples(samples):
    return [(int(sample["row"]), int(sample["index"])) for sample in samples]


@EVERY_KIND
def test_a_collate_fn_gets_samples_with_the_numbers_of_rows(file, kind):
    datamodule = module(kind, file, weights={"balance_key": "y"}, collate_fn=of_samples)
    datamodule.setup("fit")
    pairs = [pair for batch in datamodule.train_dataloader() for pair in batch]
    assert len(pairs) == ROWS
    assert all(row == index for row, index in pairs)


@EVERY_KIND
def test_overfitting_repeats_the_same_batches_of_balanced_rows(file, kind):
    first, second, third = trained(module(kind, file, weights={"balance_key": "y"}), overfit_batches=12, max_epochs=3)
    assert first == second == third
    assert len(first) == 12 * BATCH


@EVERY_KIND
def test_batches_come_whole_where_the_end_is_dropped(file, kind):
    rows, _ = trained(module(kind, file, weights={"balance_key": "y"}, batch_size=35, drop_last=True))
    assert len(rows) == ROWS // 35 * 35


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED = {
    "both keys": ({"weight_key": "w", "balance_key": "y"}, r"weight_key='w' and balance_key='y' were given"),
    "class weights alone": ({"class_weights": {0: 1}}, r"class_weights was given without balance_key"),
    "class weights with a column": ({"weight_key": "w", "class_weights": {0: 1}}, r"without balance_key"),
    "a class that is left out": (
        {"balance_key": "y", "class_weights": {0: 1, 1: 1}},
        r"class_weights names 0, 1; the classes of 'y' are .*2",
    ),
    "a class that is not there": (
        {"balance_key": "y", "class_weights": {0: 1, 1: 1, 2: 1, 3: 1}},
        r"class_weights names 0, 1, 2, 3; the classes of 'y' are",
    ),
    "a negative class weight": ({"balance_key": "y", "class_weights": {0: 1, 1: -1, 2: 1}}, r"class 1 is -"),
    "a class weight that is NaN": (
        {"balance_key": "y", "class_weights": {0: 1, 1: float("nan"), 2: 1}},
        r"class 1 is nan",
    ),
    "class weights that are all 0": ({"balance_key": "y", "class_weights": {0: 0, 1: 0, 2: 0}}, r"weights are 0"),
    "a class weight in words": ({"balance_key": "y", "class_weights": {0: 1, 1: "often", 2: 1}}, r"often"),
    "weights of text": ({"weight_key": "name"}, r"weight_key='name' has values of"),
    "weights with axes": ({"weight_key": "x"}, r"weight_key='x' has values of .*shape \(1200, 4\)"),
    "classes with axes": ({"balance_key": "x"}, r"balance_key='x' has values of shape \(1200, 4\)"),
    "negative weights": ({"weight_key": "negative"}, r"row 7 has the weight -1.0, and 1 of 1200 rows"),
    "weights that are NaN": ({"weight_key": "missing"}, r"row 7 has the weight nan, and 1 of 1200 rows"),
    "weights that are all 0": ({"weight_key": "zero"}, r"all 1200 weights are 0"),
    "classes that are NaN": ({"balance_key": "missing"}, r"balance_key='missing' has .*\(NaN\)"),
    "weights of other rows": ({"weight_key": "short"}, r"weight_key='short' has 3 rows and the data has 1200"),
}


@pytest.mark.parametrize("module", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
@pytest.mark.parametrize("dtype", ["f4", "u1", "?"])
@pytest.mark.parametrize("sample", [None, "segment"])
def test_one_hot_rows_are_classes(tmp_path, module, dtype, sample):
    """They split and balance as the numbers of their columns do."""
    classes = np.arange(60) % 6 // 4 * 2  # two thirds are 0, the others 2; no row is 1
    path = str(tmp_path / "hot.h5")
    with h5py.File(path, "w") as file:
        file["x"], file["number"] = np.arange(60.0), classes
        file["hot"], file["column"] = np.eye(3)[classes].astype(dtype), classes[:, None]
        file["two"] = np.ones((60, 3), dtype)
        for at, number in enumerate(classes):
            file[f"part/{at}/x"] = np.full(2, at / 1.0)
            file[f"part/{at}/number"] = [number] * 2
            file[f"part/{at}/hot"] = np.eye(3)[[number] * 2].astype(dtype)

    def rows_with(key):
        fields = {"fields": ["x"]} if module is CombinedHDF5DataModule else {"x_key": {"x": "x"}}
        segments = {} if sample is None else {"segments": "part/*", "sample": "segment"}
        split = {"val_fraction": 0.3, "stratify_key": key}
        made = module(path, **fields, **segments, split=split, weights={"balance_key": key}, batch_size=7)
        made.setup("fit")
        batches = [batch["x"].tolist() for batch in made.train_dataloader()]
        rows = batches, [batch["x"].tolist() for batch in made.val_dataloader()]
        made.teardown("fit")
        return rows

    assert rows_with("hot") == rows_with("number")
    if sample is None:
        assert rows_with("column") == rows_with("number")
        with pytest.raises(H5ValueError, match=r"stratify_key='two' has .* row 0 of them is not one-hot"):
            rows_with("two")


@EVERY_KIND
@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_make_no_sense_are_refused(make_h5, kind, case):
    at_seven = np.arange(ROWS) == 7
    more = {
        "negative": np.where(at_seven, -1.0, 1.0),
        "missing": np.where(at_seven, np.nan, 1.0),
        "zero": np.zeros(ROWS),
        "short": np.ones(3),
    }
    path = make_h5(arrays() | more)
    options, text = REFUSED[case]
    with pytest.raises(H5ValueError, match=text):
        module(kind, path, **options).setup("fit")


def test_an_array_that_is_not_there_is_refused_with_its_name(file):
    with pytest.raises(Exception, match="absent") as refused:
        module("lazy", file, weights={"balance_key": "absent"}).setup("fit")
    assert "H5" in type(refused.value).__name__


def test_weights_and_a_mixture_that_both_say_how_often_rows_come_are_refused(file):
    with pytest.raises(H5ValueError, match="both decide how often rows are drawn"):
        CombinedHDF5DataModule(
            mixture={"sources": {"a": file, "b": file}, "strategy": "round_robin"},
            weights={"balance_key": "y"},
        )


@pytest.mark.parametrize("classes", [[1234567, 1234568], ["1", "01"], [2**60, 2**60 + 1]])
def test_classes_that_look_alike_stay_apart(make_h5, classes):
    text = isinstance(classes[0], str)
    labels = np.array([classes[row % 2] for row in range(60)], dtype=h5py.string_dtype() if text else "i8")
    path = make_h5({"x": np.arange(60.0), "y": labels})
    weights = {classes[0]: 1, classes[1]: 1}
    module = LazyH5DataModule(
        path, x_key={"x": "x", "y": "y"}, weights={"balance_key": "y", "class_weights": weights}, batch_size=60
    )
    module.setup("fit")
    (batch,) = module.train_dataloader()
    found = [str(label) for label in (batch["y"] if isinstance(batch["y"], list) else batch["y"].tolist())]
    assert {found.count(str(name)) for name in classes} == {30}


@pytest.mark.parametrize("weights", [{"0": 1, "1": 3}, {0: 1, 1.0: 3}, {False: 1, True: 3}, {"0.0": 1, "1": 3}])
def test_a_class_may_be_written_in_any_way(make_h5, weights):
    path = make_h5({"x": np.arange(400.0), "y": np.arange(400) % 2})
    module = LazyH5DataModule(
        path, x_key="x", y_key="y", weights={"balance_key": "y", "class_weights": weights}, batch_size=400
    )
    module.setup("fit")
    ((_, y),) = module.train_dataloader()
    assert abs(float(y.double().mean()) - 0.75) < 0.04
