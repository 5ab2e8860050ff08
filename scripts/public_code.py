"""What the battery says of training loops of public repositories, unchanged, in a folder of checkouts.

python scripts/public_code.py FOLDER [-k TEXT]

Their data are replaced by small random tensors of the same shapes; the loops, models and losses are the repositories'
own, run from the checkouts. Whether what is said is true is for a reader to judge. FOLDER/site, where it exists, holds
packages that some of them import: torchvision, einops and timm.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop import check_loop
from scripts.public import images, policies, sequences, series, text, unlabelled, vision


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.append(str(options.folder / "site"))
    modules = images, sequences, policies, vision, unlabelled, text, series
    loops = {name: make for module in modules for name, make in module.loops(options.folder).items()}
    for name, make in loops.items():
        if options.k in name:
            began = time.perf_counter()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    results = check_loop(make, raises=False, timeout=600)
            except Exception as error:
                print(f"{name}: not run: {type(error).__name__}: {error}", flush=True)
                continue
            findings = [f for r in results.results for f in r.findings]
            print(f"{name}: {time.perf_counter() - began:.0f} s, {len(findings)} findings", flush=True)
            for finding in findings:
                print(f"  {finding.level} {finding.check}:{finding.cause}: {finding.summary} [{finding.where}]")
            for result in results.results:
                if result.outcome == "error":
                    print(f"  error {result.check}: {result.reason[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
