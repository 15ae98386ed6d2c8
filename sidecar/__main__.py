"""`python -m sidecar` is the command `hermes-sidecar`."""

import sys

from sidecar.cli import main

if __name__ == "__main__":
    sys.exit(main())
