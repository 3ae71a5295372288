"""Rivals that run beside mlakit where they are present. None of them is a dependency.

    present()            why each is not here, None if it is
    origins()            of those that are here, which build
    baselines(problem)   those that can take a problem, ready to be timed, and why not the others

flash_mla, fa3, flashinfer, sdpa, eager   one rival each
fetch                                     gets the first two out of a released wheel
folder                                    where they then are, and how they are loaded
"""

from __future__ import annotations

import torch

from mlakit.bench.peers import eager, fa3, flash_mla, flashinfer, sdpa
from mlakit.bench.peers.peer import Absent, CannotTake, told
from mlakit.bench.problems import Problem
from mlakit.bench.suite import PEER_ERRORS, Baseline

PEERS = (flash_mla.PEER, fa3.PEER, flashinfer.PEER, sdpa.PEER, eager.PEER)


def present() -> dict[str, str | None]:
    """By name of the peer: why it is not here, None if it is."""
    return {peer.name: peer.why_absent() for peer in PEERS}


def origins() -> dict[str, str]:
    """By name of the peers that are here: which build it is."""
    return {peer.name: peer.origin() for peer in PEERS if peer.why_absent() is None}


def baselines(
    problem: Problem, only: tuple[str, ...] | None = None
) -> tuple[list[Baseline], list[tuple[str, str]]]:
    """Peers that take the problem, each called once already; and (name, reason) of the others.

    only  names of the peers that are asked at all; None: all of them

    A baseline's call returns the result: [b, s_q, h, 512], [tokens, h, 512] or [tokens, h, 128].
    What a peer does once per step (schedules, plans, padding) is done here, not in the call.
    """
    ready: list[Baseline] = []
    left_out: list[tuple[str, str]] = []
    for peer in PEERS:
        if only is not None and peer.name not in only:
            continue
        try:
            call = peer.prepare(problem)
            call()  # fills schedules in, compiles what is compiled late, and shows what breaks
            if problem.q.is_cuda:
                torch.cuda.synchronize(problem.q.device)
        except (Absent, CannotTake) as reason:
            left_out.append((peer.name, str(reason)))
        except PEER_ERRORS as error:
            left_out.append((peer.name, told(error)))
        else:
            ready.append(Baseline(peer.name, call))
    return ready, left_out
