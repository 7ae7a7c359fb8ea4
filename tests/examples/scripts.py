"""Running the examples as a user does: in a process of their own."""

import os
import subprocess
import sys


def run_script(*arguments, cwd=None, **environment):
    """What a script prints; it must not fail."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
