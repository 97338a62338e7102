"""Run the `isthmus` command as `python -m isthmus`."""

import sys

from isthmus.cli import main

sys.exit(main())
