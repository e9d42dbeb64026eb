"""`python -m phloem.srt.cli` is `phloem`."""

import sys

from phloem.srt.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
