"""The one limit of time in tests: a guard against waiting for ever, which decides no test on a machine that is busy."""

import time

HANG = 600
"""Seconds after which a test that waits fails; ``timeout`` in ``pyproject.toml`` ends all others after 1200."""


def wait_until(claim, text="it never came"):
    """Returns once a claim holds, with its value."""
    end = time.monotonic() + HANG
    while not (value := claim()):
        assert time.monotonic() < end, text
        time.sleep(0.002)
    return value
