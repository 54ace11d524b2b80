"""What an installed package needs, except torch and what is built for one torch: ``python needs.py PACKAGE``."""

import sys
from importlib.metadata import requires

for line in requires(sys.argv[1]) or ():
    if not line.startswith("torch") and "extra ==" not in line:
        print(line)
