"""Research communities: how they store their data, and how they load it."""

from __future__ import annotations

from . import (
    aloha,
    cells,
    clam,
    era5,
    fastmri,
    labram,
    ml4gw,
    pdebench,
    prott5,
    robomimic,
    salt,
    spice,
    tenx,
    the_well,
    volumes,
)
from .base import Community

COMMUNITIES: dict[str, Community] = {
    "robomimic": robomimic.COMMUNITY,
    "aloha": aloha.COMMUNITY,
    "the_well": the_well.COMMUNITY,
    "pdebench": pdebench.COMMUNITY,
    "era5": era5.COMMUNITY,
    "fastmri": fastmri.COMMUNITY,
    "volumes": volumes.COMMUNITY,
    "clam": clam.COMMUNITY,
    "labram": labram.COMMUNITY,
    "cells": cells.COMMUNITY,
    "tenx": tenx.COMMUNITY,
    "prott5": prott5.COMMUNITY,
    "spice": spice.COMMUNITY,
    "salt": salt.COMMUNITY,
    "ml4gw": ml4gw.COMMUNITY,
}
