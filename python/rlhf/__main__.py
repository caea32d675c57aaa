"""`python -m rlhf`: the command `rlhf`."""

import sys

from rlhf._launch import main

sys.exit(main())
