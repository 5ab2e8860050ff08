"""``python -m pytest_trainloop train.py``: a training script, unchanged, watched and judged."""

from __future__ import annotations

import sys


def main() -> int:
    """What the script's training comes to, as an exit status."""
    from pytest_trainloop.frontends.script_runner.command import command

    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
