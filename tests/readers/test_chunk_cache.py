"""The pool of blocks: no block is lost, moved under a reader, or in two places; no reader waits for ever."""

import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from factories import in_threads
from guards import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from tiers import examples

from lightning_h5.readers.chunk_cache import MOST_TOGETHER, ROOM_AHEAD, ChunkCache, _Stack, load_tasks

SLOT_ROWS, ROW_SHAPE = 2, (3,)


def make_pool(n_blocks, n_slots):
    return ChunkCache(n_blocks, n_slots, SLOT_ROWS, ROW_SHAPE, np.dtype("i8"))


def slot_of(pool, slot):
    return pool.memory(np.array([slot]), SLOT_ROWS)[0]


def lease(pool, blocks, n_tasks=1):
    blocks = np.array(blocks, dtype=np.int64)
    return pool.lease(blocks, np.full(len(blocks), n_tasks))


def reserve(pool, blocks, n_tasks=1):
    blocks = np.array(blocks, dtype=np.int64)
    return pool.reserve(blocks, np.full(len(blocks), n_tasks))


def give_back(pool, held, is_done=False):
    pool.give_back(held, np.full(len(held.slots), is_done))


def load(pool, blocks, held):
    """Loads the new blocks of a lease."""
    for block, slot, is_new in zip(blocks, held.slots.tolist(), held.is_new, strict=True):
        if is_new:
            slot_of(pool, slot)[...] = block
            pool.finish_task(np.array([slot]))


class PoolMachine(RuleBasedStateMachine):
    """Leases, reservations and tasks in any order; what is in a slot says whose it is."""

    leases = Bundle("leases")

    @initialize(n_slots=st.integers(1, 6), n_blocks=st.integers(6, 15))
    def make(self, n_slots, n_blocks):
        self.pool, self.n_blocks = make_pool(n_blocks, n_slots), n_blocks
        self.memory = self.pool.rows.__array_interface__["data"][0]
        self.held = []  # leases, with their blocks
        self.todo = []  # tasks: block, slot
        self.failed = {}  # slot: what went wrong there
        assert len(self.pool) == n_slots

    def blocks(self, seed, most):
        random = np.random.default_rng(seed)
        return random.permutation(self.n_blocks)[: random.integers(1, most + 1)]

    def began(self, blocks, got, n_tasks):
        for block, slot, is_new in zip(blocks.tolist(), got.slots.tolist(), got.is_new.tolist(), strict=True):
            assert -1 <= slot < len(self.pool)
            if is_new:
                assert slot >= 0
                self.failed.pop(slot, None)
                self.todo += [(block, slot)] * n_tasks
        placed = got.slots[got.slots >= 0]
        assert len(set(placed.tolist())) == len(placed)

    @rule(target=leases, seed=st.integers(0, 10**6), n_tasks=st.integers(1, 3))
    def lease(self, seed, n_tasks):
        blocks = self.blocks(seed, 8)
        got = self.pool.lease(blocks, np.full(len(blocks), n_tasks))
        self.began(blocks, got, n_tasks)
        if (got.slots < 0).all():  # holds nothing, and is not given back
            assert not got.is_new.any()
            return None
        self.held.append((blocks, got))
        return self.held[-1]

    @rule(seed=st.integers(0, 10**6), n_tasks=st.integers(1, 3))
    def reserve(self, seed, n_tasks):
        blocks = self.blocks(seed, 8)
        self.began(blocks, self.pool.reserve(blocks, np.full(len(blocks), n_tasks)), n_tasks)

    @precondition(lambda self: self.todo)
    @rule(at=st.integers(0, 10**6), fails=st.sampled_from([False, False, False, True]))
    def do_task(self, at, fails):
        block, slot = self.todo.pop(at % len(self.todo))
        error = ValueError(f"block {block}") if fails else None
        if fails:
            self.failed[slot] = error
        slot_of(self.pool, slot)[...] = block
        self.pool.finish_task(np.array([slot]), error)

    @rule(given=consumes(leases), done=st.integers(0, 255))
    def give_back(self, given, done):
        if given is None:
            return
        blocks, got = given
        loading = {slot for _, slot in self.todo}
        if loading & set(got.slots.tolist()):  # a reader waits for its blocks before it gives them back
            assert not self.pool.is_loaded(got)
            self.todo, mine = (
                [t for t in self.todo if t[1] not in got.slots],
                [t for t in self.todo if t[1] in got.slots],
            )
            for block, slot in mine:
                slot_of(self.pool, slot)[...] = block
                self.pool.finish_task(np.array([slot]))
        assert self.pool.is_loaded(got)
        self.pool.wait(got)
        wrong = [slot for slot in got.slots.tolist() if slot in self.failed]
        assert self.pool.errors(got) == {slot: self.failed[slot] for slot in wrong}
        is_done = np.array([bool(done >> at & 1) for at in range(len(blocks))]) & (not wrong)
        self.held = [other for other in self.held if other is not given]
        self.pool.give_back(got, is_done)

    @invariant()
    def what_is_leased_stays_where_it_is(self):
        if not hasattr(self, "pool"):
            return
        loading, places = {slot for _, slot in self.todo}, {}
        for blocks, got in self.held:
            for block, slot in zip(blocks.tolist(), got.slots.tolist(), strict=True):
                if slot >= 0 and slot not in loading and slot not in self.failed:
                    assert (slot_of(self.pool, slot) == block).all()
                if slot >= 0:
                    assert places.setdefault(slot, block) == block  # never two blocks in a slot
        assert self.pool.rows.__array_interface__["data"][0] == self.memory
        assert len(self.pool.rows) == len(self.pool) * SLOT_ROWS

    @precondition(lambda self: not self.held and not self.todo)
    @rule(seed=st.integers(0, 10**6))
    def somebody_alone_gets_all_that_there_is(self, seed):
        """No slot is ever lost: who waits for room finds some, and in the end has what was asked or the whole pool."""
        blocks = self.blocks(seed, self.n_blocks)
        left = blocks
        for _ in range(3 * len(blocks)):
            self.pool.wait_for_room()  # must come back at once
            got = self.pool.lease(left, np.ones(len(left), dtype=np.int64))
            self.began(left, got, 1)
            while self.todo:
                self.do_task(0, False)
            there = got.slots >= 0
            for block, slot in zip(left[there].tolist(), got.slots[there].tolist(), strict=True):
                assert slot in self.failed or (slot_of(self.pool, slot) == block).all()
            if there.any():
                self.pool.errors(got)
                self.pool.give_back(got, np.zeros(len(left), dtype=bool))
            left = left[~there]
            if not len(left):
                return
        raise AssertionError("it never got all")


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(80), stateful_step_count=40)


def test_a_block_that_is_done_stays_readable_until_its_place_is_needed():
    pool = make_pool(9, 2)
    held = lease(pool, [3, 4])
    load(pool, [3, 4], held)
    give_back(pool, held, is_done=True)
    again = lease(pool, [4])
    assert not again.is_new.any()
    assert (slot_of(pool, int(again.slots[0])) == 4).all()
    give_back(pool, again)
    both = lease(pool, [7, 8])  # 4 was needed again: the place of 3 is free
    assert (both.slots >= 0).sum() == 1
    assert int(both.slots[0]) != int(again.slots[0])


def test_a_block_that_is_done_gives_its_place_back_also_where_another_reader_still_holds_it():
    """Its last row may be out with one reader while another is still copying."""
    pool = make_pool(9, 1)
    first = lease(pool, [3])
    load(pool, [3], first)
    second = lease(pool, [3])
    give_back(pool, second, is_done=True)
    assert (reserve(pool, [5]).slots < 0).all()  # the first still copies from it
    give_back(pool, first)
    assert (reserve(pool, [5]).slots >= 0).all()


def test_reserving_throws_nothing_out_and_holds_nothing():
    pool = make_pool(9, 2)
    held = lease(pool, [0, 1])
    load(pool, [0, 1], held)
    give_back(pool, held)
    ahead = reserve(pool, [2, 0])
    assert (ahead.slots[0], ahead.slots[1] >= 0, ahead.is_new.any()) == (-1, True, False)
    held = lease(pool, [2])
    assert held.slots[0] >= 0


def test_what_is_reserved_is_not_thrown_out_before_it_is_loaded():
    pool = make_pool(9, 1)
    ahead = reserve(pool, [5])
    assert (lease(pool, [6]).slots < 0).all()
    pool.finish_task(ahead.slots)
    held = lease(pool, [6])
    assert held.is_new.tolist() == [True]


def test_the_block_that_was_not_used_for_longest_goes_first():
    pool = make_pool(9, 3)
    for block in (0, 1, 2, 0, 1):
        held = lease(pool, [block])
        load(pool, [block], held)
        give_back(pool, held)
    for block, is_new in ((7, True), (0, False), (1, False), (2, True)):
        held = lease(pool, [block])
        assert bool(held.is_new[0]) is is_new, block
        load(pool, [block], held)
        give_back(pool, held)


def test_an_error_is_told_to_all_who_hold_the_block_and_then_tried_again():
    pool = make_pool(9, 3)
    first, second = lease(pool, [3, 4]), lease(pool, [3])
    broken = ValueError("broken")
    pool.finish_task(first.slots[:1], broken)
    pool.finish_task(first.slots[1:])
    for held in (first, second):
        assert pool.is_loaded(held)
        assert [*pool.errors(held).values()] == [broken]
    give_back(pool, first)
    give_back(pool, second)
    again = lease(pool, [3, 4])
    assert again.is_new.tolist() == [True, False]
    load(pool, [3, 4], again)
    assert not pool.errors(again)


def test_a_block_that_failed_never_seems_to_be_loaded():
    """Reads look without the lock, so at any line of the thread that notes the error."""
    pool, states = make_pool(4, 2), []
    held = lease(pool, [3, 1])

    def look(*_):
        states.append((pool.is_loaded(held), len(pool.errors(held))))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        pool.finish_task(held.slots, ValueError("broken"))
    finally:
        sys.settrace(before)
    assert set(states) == {(False, 0), (False, 2), (True, 2)}


def test_an_error_of_a_block_that_was_thrown_out_is_forgotten():
    pool = make_pool(9, 1)
    pool.finish_task(reserve(pool, [3]).slots, ValueError("broken"))
    held = lease(pool, [4])
    load(pool, [4], held)
    assert not pool.errors(held)


def test_a_block_of_several_tasks_is_there_when_the_last_one_is_done():
    pool = make_pool(9, 2)
    held = lease(pool, [3, 4], n_tasks=3)
    ready = []
    waiter = threading.Thread(target=lambda: (pool.wait(held), ready.append(time.monotonic())), daemon=True)
    waiter.start()
    for task in range(3):
        assert not pool.is_loaded(held)
        assert not ready
        pool.finish_task(held.slots)
        assert pool.is_loaded(held) == (task == 2)
    waiter.join(HANG)
    assert ready


def test_who_waits_for_room_goes_on_when_somebody_gives_back():
    pool = make_pool(9, 1)
    held = lease(pool, [0])
    load(pool, [0], held)
    waiter = threading.Thread(target=pool.wait_for_room, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    give_back(pool, held)
    waiter.join(HANG)
    assert not waiter.is_alive()
    assert lease(pool, [1]).slots[0] == 0


def read_all(pool, seed, n_blocks):
    """As a reader does: leases what it gets, loads, looks, gives back, until all was there."""
    random = np.random.default_rng(seed)
    for _ in range(12):
        left = random.permutation(n_blocks)[: random.integers(1, n_blocks)]
        if random.integers(0, 3) == 0:
            ahead = pool.reserve(left, np.ones(len(left), dtype=np.int64))
            load(pool, left.tolist(), ahead)
        while len(left):
            while not ((held := pool.lease(left, np.ones(len(left), dtype=np.int64))).slots >= 0).any():
                pool.wait_for_room()
            load(pool, left.tolist(), held)
            pool.wait(held)
            there = held.slots >= 0
            for block, slot in zip(left[there].tolist(), held.slots[there].tolist(), strict=True):
                assert (slot_of(pool, slot) == block).all()
            pool.give_back(held, random.integers(0, 2, len(left)).astype(bool))
            left = left[~there]


@pytest.mark.parametrize("n_slots", [1, 2, 5])
def test_threads_that_need_more_blocks_than_the_pool_has_all_come_to_an_end(n_slots):
    pool = make_pool(12, n_slots)
    in_threads(*(partial(read_all, pool, seed, 12) for seed in range(12)))
    held = lease(pool, range(12))
    assert (held.slots >= 0).sum() in range(1, n_slots + 1)


def test_keeping_books_takes_no_more_memory_from_epoch_to_epoch():
    """Where all has a place, blocks are given back and taken again for ever, and no slot is ever looked for."""
    pool = make_pool(4, 4)
    for _ in range(500):
        held = lease(pool, range(4))
        load(pool, range(4), held)
        give_back(pool, held, is_done=True)
    assert len(pool._free) < 100


@given(st.integers(1, 8), st.data())
def test_free_slots_are_taken_last_in_first_out_and_can_be_taken_back_from_anywhere(n, data):
    stack, model = _Stack(n), dict.fromkeys(range(n - 1, -1, -1))
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["pop", "push", "remove"])):
            case "pop":
                n_taken = data.draw(st.integers(0, n + 2))
                expected = [model.popitem()[0] for _ in range(min(n_taken, len(model)))]
                assert stack.pop(n_taken).tolist() == expected
            case "push":
                new = data.draw(st.permutations(sorted(set(range(n)) - set(model))))
                new = new[: data.draw(st.integers(0, len(new)))]
                stack.push(np.array(new, dtype=np.int64))
                model |= dict.fromkeys(new)
            case "remove":
                some = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n))
                stack.remove(np.array(some, dtype=np.int64))
                for number in some:
                    model.pop(number, None)
        assert len(stack) == len(model)
        assert np.flatnonzero(stack.has).tolist() == sorted(model)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 10**6))
def test_each_read_wakes_once_its_own_blocks_are_loaded(n_blocks, n_readers, seed):
    random, pool = np.random.default_rng(seed), make_pool(n_blocks, n_blocks)
    needed = [random.permutation(n_blocks)[: random.integers(1, n_blocks + 1)] for _ in range(n_readers)]
    leases = [lease(pool, blocks, n_tasks=2) for blocks in needed]
    todo = [block for blocks, held in zip(needed, leases, strict=True) for block in blocks[held.is_new].tolist()] * 2
    left = np.bincount(todo, minlength=n_blocks)
    woken = [threading.Event() for _ in leases]

    def read(at):
        pool.wait(leases[at])
        woken[at].set()

    threads = [threading.Thread(target=read, args=(at,), daemon=True) for at in range(n_readers)]
    for thread in threads:
        thread.start()
    for block in random.permutation(todo).tolist():
        assert not any(event.is_set() for event, blocks in zip(woken, needed, strict=True) if left[blocks].any())
        left[block] -= 1
        pool.finish_task(pool.places(np.array([block])))
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()


def test_a_read_that_was_interrupted_waits_no_more(monkeypatch):
    pool = make_pool(2, 2)
    held = lease(pool, [0, 1])

    class Interrupted:
        def __init__(self):
            self.n = 0

        def acquire(self, timeout=-1):
            self.n += 1
            if self.n == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr("lightning_h5.readers.chunk_cache.threading.Lock", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.wait(held)
    pool.finish_task(held.held)  # would release a lock that has no release
    assert pool.is_loaded(held)


class Parts:
    """A source of blocks that only notes what it was asked for."""

    def __init__(self, n_parts, parts_together):
        self.n_parts, self.parts_together, self.rows_per_block = n_parts, parts_together, SLOT_ROWS
        self.loaded = []

    def load(self, blocks, parts, memory):
        self.loaded.append([(block, part) for block in blocks for part in parts])


@given(
    n_blocks=st.integers(0, 30),
    n_parts=st.integers(1, 5),
    parts_together=st.integers(1, 12),
    n_sharing=st.integers(0, 9),
    n_slots=st.integers(30, 200),
)
def test_tasks_of_any_size_load_each_part_of_each_block_once(n_blocks, n_parts, parts_together, n_sharing, n_slots):
    """Only tasks of several whole blocks grow, as far as each thread has room for one."""
    pool, source = make_pool(60, n_slots), Parts(n_parts, parts_together)
    blocks = np.random.default_rng(n_blocks).permutation(60)[:n_blocks]
    held = lease(pool, blocks, -(-n_parts // parts_together))
    for task in load_tasks(pool, source, blocks, held.slots, n_sharing):
        task()
    loaded = [piece for pieces in source.loaded for piece in pieces]
    assert sorted(loaded) == [(block, part) for block in sorted(blocks.tolist()) for part in range(n_parts)]
    assert pool.is_loaded(held)
    n_together = max(1, parts_together // n_parts)
    if n_together > 1 and n_sharing:
        n_together = max(n_together, min(MOST_TOGETHER * n_together, n_slots // ROOM_AHEAD // n_sharing))
    n_tasks = -(-n_blocks // n_together) * max(1, -(-n_parts // parts_together))
    assert len(source.loaded) == n_tasks
