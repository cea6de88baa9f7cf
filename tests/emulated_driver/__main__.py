"""`python -m emulated_driver MODULE WORDS`: runs a module's `main(WORDS)` where the emulated driver is the driver."""

from __future__ import annotations

import importlib
import sys

from emulated_driver import control


def main() -> int:
    """Loads the driver before cuda-python looks for one, then runs the module."""
    control.load()
    result = importlib.import_module(sys.argv[1]).main(sys.argv[2:])
    return int(result)


if __name__ == "__main__":
    sys.exit(main())
