"""Constants of the cost model, fitted to what ``linalg-dsl bench --kernels --out rows.json`` measured.

    python tests/gpu/fit_model.py rows.json more.json

Prints ``PREP`` of ``codegen/schedule/predict.py`` by least squares of relative errors over kernels that are
not bound by their bytes, and how far predictions are off before and after. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linalg_dsl.codegen.schedule.levels import reached
from linalg_dsl.codegen.schedule.predict import LAUNCH, PREP
from linalg_dsl.codegen.targets import TARGETS

BANDWIDTH = TARGETS["sm_90"].bandwidth


def fitted(rows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Constants, none negative, that predict these kernels with the least relative errors."""
    import torch

    used = [r for r in rows if r["features"] and r["us"] > 1.15 * r["moved"] / reached(BANDWIDTH)]
    if not used:
        raise SystemExit("no prep in these rows is bound by its operations")
    wanted = torch.tensor([1.0 for _ in used], dtype=torch.float64)
    table = torch.tensor(
        [[x / max(r["us"] - LAUNCH, 1e-3) for x in r["features"]] for r in used], dtype=torch.float64
    )
    free = list(range(table.shape[1]))
    while free:
        found = torch.linalg.lstsq(table[:, free], wanted, driver="gelsd").solution
        bad = [i for i, x in zip(free, found.tolist(), strict=True) if x < 0]
        if not bad:
            break
        free = [i for i in free if i not in bad]
    values = dict(zip(free, found.tolist(), strict=True)) if free else {}
    return tuple(values.get(i, 0.0) for i in range(table.shape[1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", type=Path)
    args = parser.parse_args()
    rows = [r for p in args.data for r in json.loads(p.read_text(encoding="utf-8"))["kernels"]]
    constants = fitted(rows)
    print("PREP =", tuple(round(x, 3) for x in constants), "was", PREP)
    for row in rows:
        after = row["predicted"]
        if row["features"]:
            chain = sum(a * b for a, b in zip(constants, row["features"], strict=True))
            after = LAUNCH + max(row["moved"] / reached(BANDWIDTH), chain)
        row |= {"after": after}
        print(
            f"{row['operator']:20s} {row['shape']:6s} {row['kernel']:40s} {row['us']:8.1f} us, predicted "
            f"{row['predicted']:8.1f} ({row['bound']}), fitted {after:8.1f}"
        )
    for label in ("predicted", "after"):
        off = [max(r[label] / r["us"], r["us"] / r[label]) for r in rows]
        print(
            f"{label}: off by a factor of {statistics.median(off):.2f} in the median, {max(off):.2f} at most"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
