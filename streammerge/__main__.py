"""``python -m streammerge``."""

import sys

from streammerge.cli import main

sys.exit(main())
