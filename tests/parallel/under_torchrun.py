"""What torchrun starts in the tests: context parallel decode, and a model loaded by the plan.

torchrun --nproc-per-node 2 -m tests.parallel.under_torchrun MODEL_FOLDER
"""

from __future__ import annotations

import sys

import torch
from torch import distributed as dist

from tests.parallel import heads, steps


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for method in ("all_gather", "all_to_all", "all_reduce"):
        steps.check_decode(group, 1, method)
    steps.check_head_sharded(group, 4)
    heads.check_loaded_model(group, folder)
    dist.barrier()
    if group.rank() == 0:
        print(f"{group.size()} ranks agree", flush=True)  # noqa: T201  # the test reads it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
