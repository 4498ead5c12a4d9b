"""`python -m polyreme`: the same as the command `polyreme`."""

from __future__ import annotations

import sys

from polyreme.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
