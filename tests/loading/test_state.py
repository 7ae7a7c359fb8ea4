"""The saved position: plain, small, and refused where anything in it is not as it was saved."""

import copy
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import H5ResumeError
from lightning_h5.order import BlockTable, OrderParameters, PlanSampler, Position, Segment

DATA = {"sampled": "abc", "whole": "123"}


def sampler(n_rows=1000, **options):
    parameters = OrderParameters(mode="global", seed=3, batch_size=8)
    return PlanSampler(BlockTable.of_sizes([n_rows]), parameters, batch_size=8, rank=0, world_size=2, **options)


def state(n_rows=1000):
    own = sampler(n_rows)
    segments = (Segment(8, 2, 10), Segment(5, 4, 8))
    return Position(4, segments, own.present_order()).state(own, DATA)


def test_it_comes_back_as_it_was_saved():
    order = OrderParameters(mode="global", seed=3, batch_size=8)
    restored = Position.from_state(state(), sampler(), DATA)
    assert restored == Position(4, (Segment(8, 2, 10), Segment(5, 4, 8)), order, finished=False)
    assert restored.state(sampler(), DATA) == state()


def test_it_survives_json_and_a_checkpoint():
    saved = io.BytesIO()
    torch.save(state(), saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True) == json.loads(json.dumps(state())) == state()
    assert Position.from_state(json.loads(json.dumps(state())), sampler(), DATA).epoch == 4


def test_it_has_the_same_size_for_any_number_of_rows():
    assert len(json.dumps(state(10**9))) < len(json.dumps(state())) + 20 < 1000


def test_it_stays_small_after_any_number_of_changes_within_an_epoch():
    own = sampler(10**6)
    position = Position(4, (), own.present_order())
    for change in range(300):
        blocks, parameters = own.blocks, own.parameters
        now = PlanSampler(blocks, parameters, batch_size=8 + change % 2, rank=0, world_size=1 + change % 3)
        position = position.after(now, 6)
        saved = position.state(now)
        restored = Position.from_state(saved, now)
        sequence = now.sequence(4, position.order)
        consumed = [sequence.n_consumed(each.segments, drop_last=False) for each in (restored, position)]
        assert consumed[0] == consumed[1]
        assert len(json.dumps(saved)) < 2048
        position = restored
    assert position.segments[-1].n_batches == 6 * (1 + 299 % 3)


def places(value, path=()):
    """Every place in nested plain values."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


anything = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**12), st.floats(), st.text(max_size=4), st.just([]), st.just({})
)


@settings(max_examples=examples(200))
@given(st.data())
def test_a_changed_state_is_refused_wherever_it_was_changed(data):
    changed = copy.deepcopy(state())
    *way, last = data.draw(st.sampled_from([path for path in places(changed) if path]))
    inner = changed
    for key in way:
        inner = inner[key]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        del inner[last]
    else:
        inner[last] = data.draw(
            anything.filter(lambda value: value != inner[last] or type(value) is not type(inner[last]))
        )
    with pytest.raises(H5ResumeError):
        Position.from_state(changed, sampler(), DATA)


@pytest.mark.parametrize("given", [{}, {"version": 2}, {"version": 99}, {"version": "2"}, {"version": np.int64(2)}])
def test_what_is_no_position_of_ours_is_refused(given):
    with pytest.raises(H5ResumeError):
        Position.from_state(given, sampler(), DATA)


def test_other_data_and_settings_are_refused_with_all_values_side_by_side():
    other = PlanSampler(
        BlockTable.of_sizes([999]), OrderParameters(mode="none", seed=5, batch_size=8), batch_size=8, drop_last=True
    )
    with pytest.raises(H5ResumeError) as refused:
        Position.from_state(state(), other, {"sampled": "xyz", "whole": "456"})
    for line in (
        "rows: saved 1000, present 999",
        "files: saved 'abc', present 'xyz'",
        "files (whole): saved '123', present '456'",
        "seed: saved 3, present 5",
        "order: saved 'global', present 'none'",
        "drop_last: saved False, present True",
    ):
        assert line in str(refused.value)


@pytest.mark.parametrize("present", [{"sampled": "abc"}, {"sampled": "abc", "whole": "456"}])
def test_only_what_was_read_in_both_runs_is_compared(present):
    """Files of a store are sampled, and so were all files in checkpoints of earlier versions, which have one digest."""
    own = sampler()
    for saved in ("abc", {"sampled": "abc"}, present):
        position = Position(0, (), own.present_order())
        assert Position.from_state(position.state(own, saved), own, present) == position
