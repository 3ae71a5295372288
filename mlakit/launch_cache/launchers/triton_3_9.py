"""Triton 3.9: one compiled launch function serves all kernels. It takes the arguments as one tuple,
and a description of their types."""

from __future__ import annotations

from typing import Any

from mlakit.launch_cache.launchers.compiled import encoded, unwrap
from mlakit.launch_cache.launchers.descriptors import MovedDescriptor
from mlakit.launch_cache.launchers.prepared import PreparedLaunch


def prepare(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> PreparedLaunch | None:
    """None for a kernel that needs scratch or is instrumented, or whose launcher has another
    form."""
    run = kernel.run
    found = unwrap(run.launch)
    if found is None or run.global_scratch_size or run.profile_scratch_size or run.gsan_enabled:
        return None
    function, encodings = found
    after_stream = (
        *(kernel.function, run.launch_cooperative_grid, run.launch_pdl, kernel.packed_metadata),
        *(None, None, None),  # launch metadata, enter and exit hooks
        *(None, None),  # global and profile scratch
        *(run.arg_annotations, run.kernel_signature),
    )
    expanded = encoded(arguments, encodings, _encode)
    return PreparedLaunch(function, grid, after_stream, expanded, arguments_are_one=True)


def _encode(moved: MovedDescriptor, encoding: Any) -> Any:
    # of one vendor, and only there where kernels with descriptors run
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(moved, encoding, None)
