"""Research communities: how they store their data, and how they load it."""

from __future__ import annotations

from . import robomimic
from .base import Community

COMMUNITIES: dict[str, Community] = {
    "robomimic": robomimic.COMMUNITY,
}
