"""Evidence of one GPU: see ``perf/gpu/run.py``.

Installs nothing; needs a Python with torch (2.11 or later, CUDA), pytest and hypothesis.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perf.gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
