"""`python -m dspark` is the `dspark` command."""

import sys

from dspark.cli import main

if __name__ == "__main__":
    sys.exit(main())
