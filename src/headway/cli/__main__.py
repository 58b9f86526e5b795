"""`python -m headway.cli` is `headway`."""

import sys

from . import main

sys.exit(main())
