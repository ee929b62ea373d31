"""`python -m likethat` and the `likethat` command."""

import os
import sys

# Threads that wait must not spin: on a machine with other work to do, spinning slows a step down several times.
# OpenMP reads this when torch is loaded, which happens inside the verbs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from likethat.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
