"""How many cases of a test, and examples of a property, each tier tries; `make test-long` tries all of them."""

import os
import zlib

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "few")
SHARES = {"few": 0.1, "broad": 0.25, "all": 1.0, "thorough": 20.0}
EXAMPLES = 100  # of a test that sets no number
CASES = 2  # of a parametrized test in `make test`
CASES_WIDE = 24  # more of them in `make test-wide`
CASES_WIDE_OF = {"faults": 8}
CASES_OF = dict.fromkeys(["datamodules", "datasets", "distributed", "endurance", "staging", "traps"], 1)
"""Of tests of some folders, which train, start servers or start processes."""


def examples(n):
    """Return how many of ``n`` examples a property test tries in this tier."""
    return max(5, round(n * SHARES[PROFILE]))


def load_profile():
    """Set what holds for all property tests."""
    settings.register_profile(
        PROFILE,
        max_examples=examples(EXAMPLES),
        derandomize=PROFILE != "thorough",
        deadline=None,
        database=None,
        # Each example writes files with new names, so sharing `tmp_path` between examples is harmless.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile(PROFILE)


def some_of(cases, most, name):
    """Return the cases of a test that a tier runs: evenly apart, from one on that its name decides.

    So tests with the same parameters try different ones, and all of them are tried by some test.
    """
    if len(cases) <= most:
        return cases
    first = zlib.crc32(name.encode())
    return [cases[(first + at * len(cases) // most) % len(cases)] for at in range(most)]


def spread(cases, most):
    """Return some of the cases of a conformance class: the first, the last, and some between."""
    if len(cases) <= most:
        return cases
    return [cases[round(at * (len(cases) - 1) / (most - 1))] for at in range(most)]
