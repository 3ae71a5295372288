"""Which kernel a case selects, without a launch."""

from __future__ import annotations

import pytest

from mlakit.dispatch import selection
from mlakit.dispatch.specs import KernelSpec, pretending
from mlakit.tools.workloads import Case
from tests.kernel_launchers import replace_launcher


class Launched(Exception):
    """Raised in place of a launch: nothing is compiled."""


def selected_kernel(monkeypatch: pytest.MonkeyPatch, case: Case, arch: int, *, num_sms: int) -> str:
    """Name the Hopper kernel that a case launches on such a GPU."""
    launched: list[KernelSpec] = []

    def stop(spec: KernelSpec):
        def launch(*args, **kwargs):
            launched.append(spec)
            raise Launched

        return launch

    with monkeypatch.context() as patch:
        replace_launcher(patch, case.op, lambda launch: launch)  # and no replay
        for spec in selection.specs(case.op):
            patch.setitem(spec.__dict__, "launch", stop(spec))
        trial = case.trial("cpu")
        with pretending(arch, num_sms), pytest.raises(Launched):
            trial.call("hopper")
    (spec,) = launched
    return str(spec)
