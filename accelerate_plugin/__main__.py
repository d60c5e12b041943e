"""``accelerate launch -m accelerate_plugin script.py ...``: run a script as it is, with AccelPact switched on."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from accelerate_plugin.plugin import SWITCH


def main() -> None:
    """Run the script that the command line names, as ``python`` would."""
    if len(sys.argv) < 2:
        sys.exit("usage: accelerate launch [OPTIONS] -m accelerate_plugin SCRIPT [ARGUMENTS]")
    os.environ.setdefault(SWITCH, "true")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
