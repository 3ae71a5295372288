"""Other libraries that are timed next to mlakit where they are available; none is a dependency.

    present()            why each peer is unavailable, None if it is available
    origins()            the build of each available peer
    baselines(problem)   calls of the peers that support a problem, and why the others do not

flash_mla, fa3, deep_gemm, flashinfer, sdpa, eager   one peer each
fetch                                                downloads the first three from a wheel
fetched                                              loads them from the folder of fetched peers

To add a peer, write `peers/<name>.py` with its `PEER` (see `peer.Peer`) and list it in `PEERS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.tools.bench.peers import deep_gemm, eager, fa3, flash_mla, flashinfer, sdpa
from mlakit.tools.bench.peers.peer import Unavailable, Unsupported, one_line
from mlakit.tools.bench.problems import Problem
from mlakit.tools.bench.suite import PEER_ERRORS, Baseline

PEERS = (flash_mla.PEER, fa3.PEER, deep_gemm.PEER, flashinfer.PEER, sdpa.PEER, eager.PEER)


def present() -> dict[str, str | None]:
    """Say of each peer why it is unavailable; None if it is available."""
    return {peer.name: peer.why_unavailable() for peer in PEERS}


def origins() -> dict[str, str]:
    """Return the build of each available peer."""
    return {peer.name: peer.origin() for peer in PEERS if peer.why_unavailable() is None}


def baselines(
    problem: Problem, only_grid_peers: bool = False
) -> tuple[list[Baseline], list[tuple[str, str]]]:
    """Peers that support the problem, each called once, and (name, reason) of the others.

    A baseline's call returns the result: [b, s_q, h, 512], [tokens, h, 512] or [tokens, h, 128] of
    attention, [tokens, columns] of index scores, [m, n] of a matmul. Schedules, plans and padding,
    which a peer computes once per step, are not part of the call.
    """
    ready: list[Baseline] = []
    left_out: list[tuple[str, str]] = []
    for peer in PEERS:
        if not isinstance(problem, peer.problems) or (only_grid_peers and not peer.in_grid):
            continue
        try:
            call = peer.prepare(problem)
            call()  # fills schedules, compiles kernels, and shows errors
            _synchronize(problem)
        except (Unavailable, Unsupported) as reason:
            left_out.append((peer.name, str(reason)))
        except PEER_ERRORS as error:
            left_out.append((peer.name, one_line(error)))
        else:
            ready.append(Baseline(peer.name, call))
    return ready, left_out


def _synchronize(problem: Problem) -> None:
    device = next(value.device for value in vars(problem).values() if isinstance(value, Tensor))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
