"""Prints the rows of one quickstart source as JSON lines: ``python -m tasks.quickstart corpus``."""

import json
import sys

from lineage.errors import ConfigError
from tasks.quickstart import quickstart_rows

try:
    for row in quickstart_rows(sys.argv[1] if len(sys.argv) == 2 else ""):
        print(json.dumps(row, ensure_ascii=False))
except ConfigError as error:
    sys.exit(str(error))
