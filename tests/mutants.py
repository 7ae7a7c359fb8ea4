"""Do the tests notice? Breaks the package on purpose, one small change at a time, and runs the tests on each.

    python tests/mutants.py             all of them, with the tests of make test-all; ends with 1 if any survives
    python tests/mutants.py 3 7         these
    python tests/mutants.py --few       with the tests of make test alone

Works on copies; takes some minutes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SURVIVORS_ALLOWED = 0


class Mutant(NamedTuple):
    """A change of one place of a module, and the tests that should notice."""

    what: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]


SAMPLING = ("tests/order",)
STATE = ("tests/loading/test_state.py", "tests/loading/test_loader.py")
RESUME = ("tests/datamodules/test_resume.py", "tests/distributed/test_kills.py")
NEXT_EPOCH = ("tests/loading/test_pass_tokens.py", "tests/datamodules/test_next_epoch.py")
HISTORY = ("tests/order/test_history.py", "tests/datamodules/test_rows_of_step.py")
RANKS = ("tests/distributed",)
MIXTURES = ("tests/order/test_mixture.py", "tests/datamodules/test_mixtures.py")
LOOPS = (
    "tests/readers/test_compiled_loops.py",
    "tests/readers/test_damaged_chunks.py",
    "tests/readers/test_readers_match_h5py.py",
)
AHEAD = ("tests/loading/test_device_ahead.py",)
ON_DEVICE = ("tests/readers/test_on_device.py", "tests/datamodules/test_decoding_on_device.py")
NORMALIZATION = ("tests/datasets/test_normalization.py",)
WINDOWS = ("tests/datasets/test_windows.py", "tests/datasets/test_segments.py", "tests/layouts/test_layouts.py")
DECODED = ("tests/staging/test_decoded.py",)
CHECKSUMS = ("tests/staging/test_checksums.py",)
MANY = ("tests/datasets/test_many_parts.py",)
BAD_ROWS = ("tests/faults/test_bad_rows.py", "tests/faults/test_random_bad_rows.py")
SEGMENTS = ("tests/datamodules/test_segment_splits.py", "tests/datamodules/test_combined_segments.py")

MUTANTS = [
    Mutant(
        "the sampler drops set_epoch",
        "order/samplers.py",
        "self.epoch = self._epoch_offset + epoch",
        "pass",
        SAMPLING,
    ),
    Mutant(
        "Lightning may shard the sampler again",
        "order/samplers.py",
        "class PlanSampler(RunOrder, DistributedSampler[Any], SequentialSampler):",
        "class PlanSampler(RunOrder, SequentialSampler):",
        (*SAMPLING, *RANKS),
    ),
    Mutant(
        "all ranks take the same batches",
        "order/plan.py",
        "batches.bounds(step * world_size + rank)",
        "batches.bounds(step * world_size)",
        SAMPLING,
    ),
    Mutant(
        "a part of an order is taken to be where it was expected",
        "order/permutation.py",
        "return part if part.has(position) else self._part_at(position)",
        "return part",
        ("tests/order/test_permutation.py",),
    ),
    Mutant("segments do not add up", "order/plan.py", "done += batches.stop(", "done = batches.stop(", SAMPLING),
    Mutant(
        "the ragged end is left out",
        "order/plan.py",
        "        return full + 1\n",
        "        return full\n",
        SAMPLING,
    ),
    Mutant("the last round is tiny", "order/plan.py", "else max(0, full - 1)", "else max(0, full)", SAMPLING),
    Mutant(
        "the same rows sit out each epoch",
        "order/plan.py",
        "(last_place - self.epoch * self.n_left_out)",
        "last_place",
        SAMPLING,
    ),
    Mutant(
        "all ranks evaluate the first shard",
        "order/shards.py",
        "return contiguous_shard(self.n_rows, self.world_size, self.rank, self.ends)",
        "return contiguous_shard(self.n_rows, self.world_size, 0, self.ends)",
        SAMPLING,
    ),
    Mutant("epochs have one order", "order/permutation.py", "(epoch << 8 | purpose)", "(purpose)", SAMPLING),
    Mutant(
        "no cycle walking",
        "order/permutation.py",
        "while len(outliers):\n            values",
        "while False:\n            values",
        SAMPLING,
    ),
    Mutant("the state forgets the epoch", "order/position.py", '"epoch": self.epoch,', '"epoch": 0,', STATE + RESUME),
    Mutant(
        "the state counts one batch too few",
        "order/position.py",
        "segments[-1].n_batches + segment.n_batches)",
        "segments[-1].n_batches + segment.n_batches - 1)",
        STATE + RESUME,
    ),
    Mutant("a damaged state is taken", "order/position.py", 'if state.get("digest") != digest:', "if False:", STATE),
    Mutant(
        "another file is taken",
        "order/position.py",
        '**common_digests(state["identity"], identity),',
        "",
        STATE + RESUME,
    ),
    Mutant(
        "a step after a resume has batches whose gradients were lost",
        "order/history.py",
        "            first = self.batch\n",
        "",
        HISTORY,
    ),
    Mutant(
        "the history forgets what of an epoch was consumed",
        "datamodules/run_history.py",
        "position.consumed(sampler),",
        "None,",
        HISTORY,
    ),
    Mutant(
        "the history takes a resume for the same stretch",
        "order/history.py",
        "is_whole = other.batch == 0 or not other.is_fresh",
        "is_whole = True",
        HISTORY,
    ),
    Mutant(
        "a batch whose step failed counts",
        "datamodules/trainer_progress.py",
        "self._batches.current.processed)",
        "self._batches.current.ready)",
        RESUME,
    ),
    Mutant(
        "the trainer's counter is not moved",
        "datamodules/resume.py",
        "            progress.set_batch_count(n_done)\n",
        "            pass\n",
        RESUME,
    ),
    Mutant(
        "restored counters may contradict each other",
        "datamodules/resume.py",
        "        progress.sync()\n",
        "",
        RESUME,
    ),
    Mutant(
        "an epoch past its limit goes on",
        "datamodules/resume.py",
        "elif n_done < trainer.num_training_batches:",
        "elif True:",
        RESUME,
    ),
    Mutant(
        "the batches of other ranks do not count",
        "order/position.py",
        "n_steps * world_size)",
        "n_steps)",
        RESUME,
    ),
    Mutant(
        "a second fit goes on where the first was resumed",
        "datamodules/resume.py",
        "(old.is_over or old.trainer is not trainer):",
        "old.trainer is None:",
        RESUME,
    ),
    Mutant(
        "an epoch that max_steps broke off is left out",
        "datamodules/resume.py",
        "        progress.resume_epoch(restored.epoch)\n",
        "",
        RESUME,
    ),
    Mutant(
        "a position that nobody applied is passed over",
        "datamodules/resume.py",
        "if not self.is_applied and self._is_resumed and",
        "if False and",
        RESUME,
    ),
    Mutant(
        "the position of a renamed data module is dropped",
        "datamodules/resume.py",
        "if self._pending is not None or len(names) != 1:",
        "if True:",
        RESUME,
    ),
    Mutant(
        "a new loader does not know what is consumed",
        "datamodules/resume.py",
        "sampler.restore(restored)\n        if self._restored",
        "sampler.restore(None)\n        if self._restored",
        RESUME,
    ),
    Mutant(
        "tensor-parallel peers see other rows",
        "datamodules/loaders.py",
        'int(kwargs["rank"]), int(kwargs["num_replicas"])',
        "self.trainer.global_rank, self.trainer.world_size",
        RANKS,
    ),
    Mutant("ranks may differ", "distributed/exchange.py", "if not differing:", "if True:", RANKS),
    Mutant(
        "ranks take what earlier ranks left in the store",
        "distributed/process_group.py",
        "own = secrets.token_hex(8)",
        'own = "0"',
        ("tests/distributed/test_elastic.py",),
    ),
    Mutant(
        "a rank that is late goes on alone",
        "distributed/exchange.py",
        "            if late:\n                kind",
        "            if False:\n                kind",
        RANKS,
    ),
    Mutant(
        "epochs draw the same",
        "datasets/user_functions.py",
        "words = stream(draws.seed, draws.epoch, STREAMS, draws.position)",
        "words = stream(draws.seed, 0, STREAMS, draws.position)",
        ("tests/loading/test_randomness.py",),
    ),
    Mutant(
        "the iteration starts too early",
        "loading/loader.py",
        "        self._batches: Batches | None = None\n        self._tokens: PassTokens\n",
        "        self._batches, self._tokens, self._plan, self.progress = loader.start()\n",
        STATE + RESUME,
    ),
    Mutant(
        "the same row of a shard sits out every epoch",
        "order/shard_rows.py",
        "(largest - 1 - self.epoch)",
        "(largest - 1)",
        ("tests/order",),
    ),
    Mutant(
        "all ranks draw the same order of their rows",
        "order/shard_rows.py",
        "shard, place = self.shard, 1 + self.shard.rank",
        "shard, place = self.shard, 1",
        ("tests/order",),
    ),
    Mutant(
        "shards are resumed on other ranks",
        "order/position.py",
        "        if saved_ranks == ranks:\n",
        "        if True:\n",
        ("tests/datamodules/test_rank_cached.py",),
    ),
    Mutant(
        "nobody looks whether there is room",
        "datasets/shard_loading.py",
        "    if memory is None or not _lacks(memory, needed):\n        return\n",
        "    return\n",
        ("tests/datasets/test_rank_cached_dataset.py",),
    ),
    Mutant(
        "rows are cast to the wrong places",
        "readers/bulk.py",
        "place = self._first + int(cuts[0])",
        "place = int(cuts[0])",
        (
            "tests/readers/test_bulk.py",
            "tests/datasets/test_datasets_match_h5py.py",
            "tests/datasets/test_rank_cached_dataset.py",
        ),
    ),
    Mutant("the newest batch comes first", "loading/prefetch.py", "self._begun.popleft()", "self._begun.pop()", STATE),
    Mutant(
        "batches are kept that were read ahead under other settings",
        "loading/pass_tokens.py",
        "(last.epoch != epoch or last.settings == _settings_of(self._sampler, epoch))",
        "True",
        NEXT_EPOCH,
    ),
    Mutant(
        "an epoch is read that does not come",
        "datamodules/trainer_progress.py",
        "epoch + 1 >= loop.max_epochs",
        "epoch >= loop.max_epochs",
        NEXT_EPOCH,
    ),
    Mutant(
        "a file that changes is read on",
        "datasets/file_dataset.py",
        "            self.table.guards[file].check()\n",
        "            pass\n",
        ("tests/hdf5/test_identity.py", "tests/datasets"),
    ),
    Mutant(
        "a source that is used up starts again in the same order",
        "order/recipes.py",
        "order_rows(blocks, parameters, cycle)",
        "order_rows(blocks, parameters, 0)",
        MIXTURES,
    ),
    Mutant(
        "all sources have one seed",
        "order/recipes.py",
        "seed = int(stream(parameters.seed, 0, SEEDS, number).random_raw())",
        "seed = parameters.seed",
        MIXTURES,
    ),
    Mutant(
        "all nodes have one seed",
        "order/nodes.py",
        "seed=int(stream(all_nodes.seed, 0, DEAL, 1 + node).random_raw()),",
        "seed=all_nodes.seed,",
        ("tests/order/test_nodes.py",),
    ),
    Mutant(
        "blocks are dealt to nodes in each epoch",
        "order/nodes.py",
        "deal_blocks(self._blocks, self._parameters.seed)",
        "deal_blocks(self._blocks, self._parameters.seed + self._epoch)",
        ("tests/order/test_nodes.py", "tests/datamodules/test_node_scope.py"),
    ),
    Mutant(
        "an epoch of a mixture begins each source anew",
        "order/mixture.py",
        "cycle_units = schedule.counts(n_units)",
        "cycle_units = 0 * schedule.counts(n_units)",
        MIXTURES,
    ),
    Mutant(
        "a row that comes again has the number that it had",
        "order/recipes.py",
        "return rows + (draw_numbers - draws.before(rows)) * blocks.n_rows",
        "return rows",
        ("tests/order/test_weighted.py",),
    ),
    Mutant(
        "the last batches are not halved for the ranks",
        "order/batches.py",
        "parts[largest] += 1",
        "parts[0] += 1",
        (*MIXTURES, "tests/order/test_lengths.py"),
    ),
    Mutant(
        "batches of one source are cut anew",
        "order/batches.py",
        "if segments and batch_size != self.batch_size:",
        "if False:",
        MIXTURES,
    ),
    Mutant(
        "batches are dealt from the longest to the shortest",
        "order/batches.py",
        'return np.argsort(keys, kind="stable")',
        "return np.arange(len(keys))",
        ("tests/order/test_lengths.py",),
    ),
    Mutant(
        "what is decoded is normalized again in the batch",
        "datasets/file_dataset.py",
        "columns.append(plan.cast(memory, self._buffers))",
        "columns.append(plan.finished(memory, self._buffers))",
        NORMALIZATION,
    ),
    Mutant(
        "a resumed run validates on the rest of the rows",
        "datamodules/resume.py",
        "        self._progress.begin_validation_again()\n",
        "",
        ("tests/datamodules/test_resume.py",),
    ),
    Mutant(
        "a value that an integer dtype cannot hold becomes another number",
        "datasets/fields.py",
        "for guard in (of_missing, of_cast) if guard is not None",
        "for guard in (of_missing,) if guard is not None",
        ("tests/datasets/test_casts.py",),
    ),
    Mutant(
        "files with other genes or units are mixed",
        "catalog/catalog.py",
        "self.agreement.check(name, path, annotations, rows, parts, names_in_file)",
        "pass",
        ("tests/datasets/test_meaning_of_numbers.py",),
    ),
    Mutant(
        "rows whose dtype is another one in the batch are not normalized",
        "readers/select.py",
        "Changes.all_by(None if is_changed else prepare)",
        "Changes.all_by(None)",
        NORMALIZATION,
    ),
    Mutant(
        "rows that are normalized in blocks are so again when they are copied",
        "readers/select.py",
        "Changes.all_by(None if is_changed else prepare)",
        "Changes.all_by(prepare)",
        NORMALIZATION,
    ),
    Mutant(
        "packed numbers of all files are decoded by the formula of the first",
        "readers/chunked.py",
        "Copy(out, changes[number])",
        "Copy(out, changes[0])",
        ("tests/datasets/test_netcdf.py",),
    ),
    Mutant(
        "an image of a mixed batch lies in memory that the next batch gets",
        "datasets/field_readers.py",
        'rows[at] = rows[at].copy("K")',
        "pass",
        ("tests/datasets/test_encoded.py",),
    ),
    Mutant(
        "times of files are compared whatever their units",
        "samples/segment_cuts.py",
        "if len(set(units)) <= 1:",
        "if units:",
        ("tests/datasets/test_time_units.py",),
    ),
    Mutant(
        "a rank that was sent no signal trains on",
        "callbacks/save_on_preemption.py",
        "decide(bool(self._arrived), all=False)",
        "decide(bool(self._arrived))",
        ("tests/distributed/test_preemption.py",),
    ),
    Mutant(
        "a large mean is taken off in one part",
        "datasets/multiply_add.py",
        "if low is not None:",
        "if low is False:",
        ("tests/datasets/test_affine.py",),
    ),
    Mutant(
        "what does not decode is taken by compiled code",
        "readers/filters/compiled.py",
        "if not decode(functions, state, stored, n_read, decoded):",
        "if not decode(functions, state, stored, n_read, decoded) and False:",
        LOOPS,
    ),
    Mutant(
        "the end of a bitshuffled chunk is left out",
        "readers/filters/compiled.py",
        "out[whole + i] = data[at + i]",
        "pass",
        LOOPS,
    ),
    Mutant(
        "chunks with filters left out are decoded by compiled code",
        "readers/chunk_loader.py",
        "if self._loop is None or not (self._are_all_plain or self._is_plain(numbers)):",
        "if self._loop is None:",
        LOOPS,
    ),
    Mutant(
        "compiled LZF copies beyond the end",
        "readers/filters/compiled.py",
        "n_out - LZF_REPEAT - LZF_WIDTH",
        "n_out - LZF_LITERAL",
        ("tests/readers/test_lzf.py",),
    ),
    Mutant(
        "compiled LZF copies sixteen bytes of a shorter repeat",
        "readers/filters/compiled.py",
        "if back >= LZF_WIDTH and",
        "if back >= LZF_WIDTH - 1 and",
        ("tests/readers/test_lzf.py",),
    ),
    Mutant(
        "rows outside of a memory map are read on all cores",
        "readers/contiguous.py",
        """        check_bounds(rows, len(self), f"{self.layout.key!r} in {self.layout.path!r}")
        began""",
        "        began",
        ("tests/readers/test_readers_match_h5py.py",),
    ),
    Mutant(
        "a compiled loop takes off a large mean in one part",
        "datasets/multiply_add.py",
        "np.zeros(high.size, work) if low is None else low.ravel()",
        "np.zeros(high.size, work)",
        ("tests/datasets/test_affine.py",),
    ),
    Mutant(
        "statistics of other shapes are taken",
        "datasets/normalize.py",
        "if other_shapes := [row_shape for row_shape in shapes if stats.row_shape not in (None, row_shape)]:",
        "if other_shapes := []:",
        NORMALIZATION,
    ),
    Mutant(
        "large groups all go to the training split",
        "order/splits.py",
        "owed += share * sizes[group]",
        "owed += 0",
        ("tests/order/test_splits.py",),
    ),
    Mutant(
        "windows reach over the end of their segment",
        "samples/windows.py",
        "steps.spans_of(segments) if self.pad else steps.spans_of(segments) - max(0, step_range.last) * steps.rate",
        "steps.spans_of(segments)",
        WINDOWS,
    ),
    Mutant(
        "padding is not zero",
        "samples/assemblers.py",
        "_clear(column, ~is_valid.reshape(-1))",
        "pass",
        WINDOWS,
    ),
    Mutant(
        "random windows are the same in all epochs",
        "samples/windows.py",
        "offsets = uniform(self.seed, 0 if epoch is None else epoch, STARTS, windows)",
        "offsets = uniform(self.seed, 0, STARTS, windows)",
        (*WINDOWS, *SEGMENTS),
    ),
    Mutant(
        "windows reach over steps that a filter leaves out",
        "samples/indexer.py",
        "segments=self.segments.keeping(is_kept, in_runs=True)",
        "segments=self.segments.keeping(is_kept, in_runs=False)",
        SEGMENTS,
    ),
    Mutant(
        "a split in time has steps of its neighbor's windows",
        "samples/segment_choice.py",
        "gap = indexer.reach - 1 if options.gap is None else options.gap",
        "gap = options.gap or 0",
        SEGMENTS,
    ),
    Mutant(
        "segments of ten come before those of two",
        "hdf5/patterns.py",
        "for star in sorted(stars, key=natural_order):",
        "for star in sorted(stars):",
        WINDOWS,
    ),
    Mutant(
        "evaluation cuts segments between ranks",
        "order/shards.py",
        "return (start, stop) if ends is None or not total else (_nearest(ends, start), _nearest(ends, stop))",
        "return start, stop",
        SEGMENTS,
    ),
    Mutant(
        "the last patch of an axis is left out",
        "samples/patches.py",
        'if self.options.border == "shift" and len(starts) and starts[-1] < n - size:',
        "if False:",
        ("tests/datasets/test_patches.py", "tests/layouts/test_layouts.py"),
    ),
    Mutant(
        "a kept catalog of another state of a file is used",
        "catalog/kept_parts.py",
        'if head["meaning"] != self.meaning:',
        "if False:",
        ("tests/datasets/test_many_parts.py",),
    ),
    Mutant(
        "a batch that comes again counts its bad samples again",
        "datasets/bad_sample_ledger.py",
        "_place_in_run(sample) <= _place_in_run(entry.sample)",
        "_place_in_run(sample) < _place_in_run(entry.sample)",
        BAD_ROWS,
    ),
    Mutant(
        "bad samples are named by their places in a rank's shard",
        "datasets/held_dataset.py",
        "return self.rows[held]",
        "return held",
        BAD_ROWS,
    ),
    Mutant(
        "a damaged chunk takes the good rows of its block along",
        "readers/chunked.py",
        "            if not isinstance(error, H5CorruptError):\n                raise error\n",
        "            raise error\n",
        BAD_ROWS,
    ),
    Mutant(
        "a mixture keeps places in caches after an error",
        "datasets/mixture.py",
        "            failures.append(error)\n",
        "            failures.append(error)\n            break\n",
        BAD_ROWS[:1],
    ),
    Mutant(
        "a damaged block counts as loaded before its error is noted",
        "readers/chunk_cache.py",
        "            if error is not None:\n                self._forget(slots)\n",
        "            if error is not None:\n                self._n_tasks[slots] -= 1\n"
        "                self._forget(slots)\n                self._n_tasks[slots] += 1\n",
        ("tests/readers/test_chunk_cache.py",),
    ),
    Mutant(
        "a task of a large team takes the room of all threads",
        "readers/chunk_cache.py",
        "len(cache) // ROOM_AHEAD // n_sharing",
        "len(cache) // ROOM_AHEAD",
        ("tests/readers/test_chunk_cache.py",),
    ),
    Mutant(
        "samples that a transform refused count as rows of their source",
        "datasets/base.py",
        "self._count_finished(numbers)",
        "self._count_finished(raw.rows)",
        BAD_ROWS[:1],
    ),
    Mutant(
        "decoded chunks are not compared with their checksums",
        "staging/decoded.py",
        "end[others], size) == self._sums[numbers[others]]",
        "end[others], size) >= 0",
        DECODED,
    ),
    Mutant(
        "of pieces with several checksums, the first alone is compared",
        "staging/decoded.py",
        "np.logical_and.reduceat(are_right, firsts)",
        "are_right[firsts]",
        DECODED,
    ),
    Mutant(
        "rows are compared once, whatever is written to the file later",
        "staging/decoded.py",
        "        if compared_in != state:",
        "        if not len(compared):",
        DECODED,
    ),
    Mutant(
        "a compiled write that fails counts as done",
        "staging/checksums.py",
        "                if n_written <= 0:\n                    return False\n",
        "                if n_written <= 0:\n                    break\n",
        CHECKSUMS,
    ),
    Mutant(
        "a compiled write puts checksums of later runs where those of the first belong",
        "staging/checksums.py",
        "n, at = run_sums.size * 4, sums_at + first * n_sums * 4",
        "n, at = run_sums.size * 4, sums_at",
        CHECKSUMS,
    ),
    Mutant(
        "rows of a chunk that went and came while compiled code read them are served",
        "staging/checksums.py",
        "            if marks[piece] != mark:",
        "            if marks[piece] % 2 == 0:",
        CHECKSUMS,
    ),
    Mutant(
        "compiled code compares rows only if the last of their checksums was not compared",
        "staging/checksums.py",
        "is_known = is_known and compared[number]",
        "is_known = compared[number]",
        CHECKSUMS,
    ),
    Mutant(
        "rows that share a checksum with others get their neighbors from compiled code",
        "staging/checksums.py",
        "address + within[part] - low, n_bytes",
        "address, n_bytes",
        CHECKSUMS,
    ),
    Mutant(
        "whole chunks are compared once in a minute",
        "staging/decoded.py",
        "compared[numbers] & np.repeat(sizes < self._piece_bytes, counts)",
        "compared[numbers]",
        DECODED,
    ),
    Mutant(
        "rows that share a checksum with others go where their neighbors belong",
        "readers/kept_chunks.py",
        "copy_runs(memory, firsts + within - lows, out, starts, sizes)",
        "copy_runs(memory, firsts, out, starts, sizes)",
        DECODED,
    ),
    Mutant(
        "decoded chunks of another state of the file are served",
        "hdf5/handles.py",
        "mirror_name(path, state, array.identity)",
        "mirror_name(path, (), array.identity)",
        DECODED,
    ),
    Mutant(
        "decoded chunks that were not compared with digests pass for those that were",
        "readers/kept_chunks.py",
        "{layout.filters} {digests}",
        "{layout.filters}",
        DECODED,
    ),
    Mutant(
        "chunks that were never written are kept as decoded",
        "readers/chunk_loader.py",
        "            written_numbers = numbers[self.table.offsets[chunks[numbers]] >= 0]\n",
        "            written_numbers = numbers\n",
        DECODED,
    ),
    Mutant(
        "rows that are read by position go where others belong",
        "readers/kept_rows.py",
        "pieces, rows, starts = self._pieces, self._out, self._starts",
        "pieces, rows, starts = self._pieces, self._out, self._pieces.starts",
        DECODED,
    ),
    Mutant(
        "batches that are copied ahead count as read by steps",
        "loading/loader.py",
        "self._n_taken - self.progress.n_given)\n\n    def _next_read",
        "self._n_taken - self._n_read)\n\n    def _next_read",
        AHEAD,
    ),
    Mutant(
        "an error while a batch is copied ahead is raised at once",
        "loading/held_batches.py",
        "            self._error = error\n",
        "            raise\n",
        AHEAD,
    ),
    Mutant(
        "Adler-32 is not compared on a device",
        "readers/on_device/loader.py",
        "        if adler is not None:\n",
        "        if False:\n",
        ON_DEVICE,
    ),
    Mutant(
        "what a device could not decode counts as decoded",
        "readers/on_device/loader.py",
        "failed = self._is_wrong | self._failed.cpu().numpy()",
        "failed = np.zeros_like(self._is_wrong)",
        ON_DEVICE,
    ),
    Mutant(
        "rows of a device are not handed over",
        "datasets/base.py",
        "            device.own(raw.columns)\n",
        "            pass\n",
        ON_DEVICE,
    ),
    Mutant(
        "rows of many arrays that are neighbors in a file are joined, apart in the batch",
        "readers/many_arrays.py",
        " & (np.diff(targets) == 1)",
        "",
        MANY,
    ),
    Mutant(
        "rows of many arrays are read from the file of the row before",
        "readers/many_arrays.py",
        "files, parts, places, targets = files[order], parts[order], places[order], targets[order]",
        "files, parts, places, targets = files[order], parts[order], places, targets[order]",
        MANY,
    ),
    Mutant(
        "a small array counts as read before its bytes are there",
        "readers/many_arrays.py",
        "self._arrays.read_whole(placed, held.values, self._firsts[placed])",
        "pass",
        MANY,
    ),
]


def is_caught(mutant: Mutant, few: bool = False) -> bool:
    """Return whether the tests fail on a copy of the package with the change."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        copy.mkdir()
        for name in ("lightning_h5", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        module = copy / "lightning_h5" / mutant.module
        module.write_text(module.read_text().replace(mutant.old, mutant.new))
        tier = [] if few else ["-m", "not slow"]
        arguments = [*tier, "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *mutant.tests]
        environment = os.environ | {"HYPOTHESIS_PROFILE": "few" if few else "all", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(copy)  # for the processes that tests start
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], cwd=copy, env=environment, capture_output=True, check=False
        )
        if done.returncode not in (0, 1):
            sys.stderr.buffer.write(done.stdout[-3000:] + done.stderr[-3000:])
            raise SystemExit(f"pytest could not run on the mutant {mutant.what!r}")
        return done.returncode == 1


def main() -> None:
    """Run the mutants and print which of them survive."""
    few = "--few" in sys.argv
    chosen = [int(number) for number in sys.argv[1:] if number != "--few"] or range(len(MUTANTS))
    survivors = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one process per mutant, up to the first failure
        for number, caught in zip(chosen, pool.map(lambda n: is_caught(MUTANTS[n], few), chosen), strict=True):
            print(f"{number:3} {'caught' if caught else 'SURVIVED':>9}  {MUTANTS[number].what}", flush=True)
            if not caught:
                survivors.append(number)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants were caught")
    raise SystemExit(len(survivors) > SURVIVORS_ALLOWED)


if __name__ == "__main__":
    main()
