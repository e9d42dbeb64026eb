"""`python -m phloem` is the command line."""

from __future__ import annotations

import sys

from phloem.srt.cli import main

if __name__ == "__main__":
    sys.exit(main())
