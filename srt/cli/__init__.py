"""The command line: `phloem` and its commands."""

from phloem.srt.cli.app import main

__all__ = ["main"]
