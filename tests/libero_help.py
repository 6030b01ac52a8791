"For tests that need LIBERO's assets: where they are, or a skip that says how to get them."
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

WHY = "LIBERO's assets are not there: set CLVLA_LIBERO_ASSETS to a folder or an archive of them (`clvla-libero` tells more)"


def libero_root()->Path:
    "The prepared folder; skips the test when CLVLA_LIBERO_ASSETS is not set, fails when it is set and wrong."
    if not os.environ.get("CLVLA_LIBERO_ASSETS"): pytest.skip(WHY, allow_module_level=True)
    if find_spec("libero") is None: pytest.fail("CLVLA_LIBERO_ASSETS is set and libero is not installed: pip install 'clvla[libero]'")
    from clvla.envs.libero import assets as libero_assets
    return libero_assets.libero_root()


def without_full(folder:Path)->Path:
    "A new folder with all of the assets but the full meshes."
    folder.mkdir()
    for top in ("lite", "robosuite_lite", "init_states"): (folder/top).symlink_to(libero_root()/top)
    return folder
