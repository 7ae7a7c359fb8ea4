"""The cost of loading: the time of training steps, compared with steps on batches that are already in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Literal

import torch

from ..loading import H5DataLoader, HoldLimits, Iteration

__all__ = ["LoaderCost", "cost_remark"]

WARM_UP = 32  # steps of a run before anything is measured: machine code is compiled and memory allocated
EARLY = 8  # steps of an epoch before batches are held
SETTLING, SETTLING_SECONDS = 4, 0.01  # steps with batches in memory, and time, until earlier reads have finished
LEAST_STEPS = 8  # minimum number of steps with batches in memory
MAX_EPOCHS = 10  # epochs that hold batches
MAX_SHARE, ALWAYS_SECONDS = 0.005, 0.05  # of the time of a run that reading them may take, and what it always may


class LoaderCost:
    """Times training steps; in the first epochs, also steps on batches that were read before.

    Args:
        device: device of the model; it is synchronized before and after the steps with batches in memory.
        every: steps between two logs, 0 for none. At most half of them use batches in memory, since the logged figures
            describe reading.
        seconds: time limit for reading these batches, which the loop waits for at once. Over a run, this takes at most
            0.5 % of its time.
    """

    def __init__(self, device: torch.device, every: int = 0, seconds: float = math.inf) -> None:
        self._device = device
        most = HoldLimits()
        n_batches = min(most.n_batches, every // 2) if every else most.n_batches
        self._limits = most._replace(n_batches=n_batches, seconds=min(most.seconds, seconds))
        self._seconds = self._held_seconds = 0.0  # time of ordinary steps, and of steps with batches in memory
        self._n_steps = self._n_held_steps = 0
        self._n_seen = self._n_epochs = 0  # number of steps, and of epochs with held batches
        self._began_run: float | None = None
        self._reading_seconds = 0.0  # time that the loop waited for held batches
        self._needed_seconds = 0.0  # time that enough of them took, as far as a limit of time has shown
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Note that an epoch begins."""
        self._state: Literal["before", "requested", "held", "after"] = "before"
        self._n_of_epoch = self._n_settled = 0
        self._iteration: Iteration | None = None
        self._last: float | None = None  # end of the previous step

    def pause(self) -> None:
        """Note that training pauses, for example for validation."""
        self._last = None
        if self._state == "held":
            self._state = "after"

    def step(self, loaders: Sequence[H5DataLoader]) -> None:
        """Note that a step ended.

        Args:
            loaders: the training loaders. With several loaders, no batches are held.
        """
        self._n_seen += 1
        self._n_of_epoch += 1
        if self._began_run is None:
            self._began_run = perf_counter()
        if self._iteration is not None and self._state != "after":
            self._step_of_held(self._iteration)
            return
        now = perf_counter()
        if self._last is not None and self._n_seen > WARM_UP:
            self._seconds += now - self._last
            self._n_steps += 1
        self._last = now
        if self._state == "before" and self._n_of_epoch >= EARLY and self._n_seen >= WARM_UP:
            self._request(loaders, now - self._began_run)

    def _request(self, loaders: Sequence[H5DataLoader], seconds_of_run: float) -> None:
        """Request that the loader holds the next batches in memory, if exactly one iteration runs.

        If that would take too much of the run's time by now, a later step requests it.
        """
        seconds = max(ALWAYS_SECONDS, MAX_SHARE * seconds_of_run) - self._reading_seconds
        if seconds <= self._needed_seconds:
            return
        self._state = "after"
        iterations = [iteration for loader in loaders for iteration in loader.running]
        has_room = self._limits.n_batches >= SETTLING + LEAST_STEPS
        if has_room and len(loaders) == len(iterations) == 1 and self._n_epochs < MAX_EPOCHS:
            self._state, self._last = "requested", None
            (self._iteration,) = iterations
            self._iteration.hold(self._limits._replace(seconds=min(self._limits.seconds, seconds)))

    def _step_of_held(self, iteration: Iteration) -> None:
        n_held = iteration.n_held
        if self._state == "requested":
            if not self._n_settled:
                self._note_reading(iteration)
            self._n_settled += n_held > 0
            is_settled = perf_counter() - self._read_at >= SETTLING_SECONDS or n_held <= LEAST_STEPS
            if (self._n_settled >= SETTLING and is_settled) or (self._n_settled and not n_held):
                self._state = "held" if n_held >= LEAST_STEPS else "after"
                self._began, self._n_expected = self._now(), n_held
        elif not n_held:
            self._held_seconds += self._now() - self._began
            self._n_held_steps += self._n_expected
            self._n_epochs += 1
            self._state = "after"

    def _note_reading(self, iteration: Iteration) -> None:
        """Note how long the loop has waited for the batches that are held now."""
        self._read_at, n = perf_counter(), iteration.n_held + 1
        self._reading_seconds += iteration.hold_seconds
        if n < SETTLING + LEAST_STEPS:
            self._needed_seconds = iteration.hold_seconds * (SETTLING + LEAST_STEPS + 1) / n

    def amounts(self) -> dict[str, float]:
        """Return the measured seconds and steps, to be summed over ranks."""
        return {
            "step_seconds": self._seconds,
            "n_steps": float(self._n_steps),
            "held_seconds": self._held_seconds,
            "n_held_steps": float(self._n_held_steps),
        }

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()


def cost_remark(amounts: Mapping[str, float]) -> str | None:
    """Return the cost of loading as a remark for the table; None if too few steps were measured.

    Args:
        amounts: the sums over all ranks (see ``LoaderCost.amounts``).
    """
    n_steps, n_held = amounts["n_steps"], amounts["n_held_steps"]
    if n_steps < LEAST_STEPS or n_held < LEAST_STEPS:
        return None
    step, held_step = amounts["step_seconds"] / n_steps, amounts["held_seconds"] / n_held
    cost = max(0.0, 1 - held_step / step)
    share = f"loading costs {cost:.1%} of it" if cost >= 0.001 else "no cost of loading shows in these"
    return (
        f"train: a step takes {1000 * step:,.3g} ms, and {1000 * held_step:,.3g} ms with batches that are in memory "
        f"({n_held:,.0f} steps): {share}."
    )
