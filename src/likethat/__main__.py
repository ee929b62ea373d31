"""`python -m likethat` and the `likethat` command."""

import sys

from likethat.cli import main

if __name__ == "__main__":
    sys.exit(main())
