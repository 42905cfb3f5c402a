"""`python -m harness`."""

import sys


def _main() -> None:
    try:
        from harness.cli import main
    except KeyboardInterrupt:  # pressed while the command line itself is loaded
        sys.exit(130)
    main()


if __name__ == "__main__":
    _main()
