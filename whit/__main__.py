"""`python -m whit`: the program `whit`."""

import sys

from whit.cli import main

if __name__ == "__main__":
    sys.exit(main())
