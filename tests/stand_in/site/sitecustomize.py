"""Python reads this when it starts, if this folder is on its path: so processes of a dry run are dry too."""

import os
import sys

if os.environ.get("LINALG_DSL_GPU_DRY", "0") not in ("", "0"):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from stand_in import dry

    dry.start()
