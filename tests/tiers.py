"""How many examples property tests try: few in `make test`, all in `make test-all`, more in `make test-long`."""

import os

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "few")
SHARES = {"few": 0.2, "broad": 1.0, "thorough": 20.0}
EXAMPLES = 100  # of a test that names no number


def examples(n):
    """Return how many of ``n`` examples a property test tries in this tier."""
    return max(10, round(n * SHARES[PROFILE]))


def load_profile():
    """Set what holds for all property tests."""
    settings.register_profile(
        PROFILE,
        max_examples=examples(EXAMPLES),
        derandomize=PROFILE != "thorough",
        deadline=None,
        database=None,
        # Files of an example have names of their own, so sharing `tmp_path` between examples is harmless.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile(PROFILE)
