"""`mlakit demo`: serves one full-size attention layer and compares it with its oracles."""

from __future__ import annotations

from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mlakit.dispatch import selection
from mlakit.dispatch.checks import FLOATS, UnsupportedError
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.formats import known_format, row_codec
from mlakit.model.geometry import MLAGeometry, RowShape
from mlakit.model.masks import CAUSAL
from mlakit.tools.demo import documented, report
from mlakit.tools.demo.model import make_model
from mlakit.tools.demo.oracles import checked_stages
from mlakit.tools.demo.serving import PAGE_SIZE, Settings, serve

DEVICES = ("auto", "cpu", "cuda")


def run(
    name: str, geometry: MLAGeometry, settings: Settings, *, with_documented: bool = True
) -> bool:
    """Serve, check and print. Returns whether every result is within its tolerance."""
    console = Console()
    start = perf_counter()
    codec = row_codec(settings.format, geometry.row)
    with _progress_bars(console) as progress:
        task = progress.add_task("random weights", total=None)
        model = make_model(
            geometry,
            positions=settings.positions,
            dtype=activation_dtype(settings.format, geometry),
            device=settings.device,
            generator=torch.Generator().manual_seed(settings.seed),
        )
        progress.update(task, total=1, completed=1)
        console.print(report.introduction(name, model, settings))
        if settings.device.type == "cuda":
            serve(model, settings, progress)  # the first calls compile the kernels
            if with_documented:
                documented.all_calls(progress, settings.device)
        transcript = serve(model, settings, progress)
        stages = checked_stages(transcript, model, codec, progress)
        calls = documented.all_calls(progress, settings.device) if with_documented else []
    console.print(report.stage_table(stages, geometry))
    console.print("", report.facts(geometry, settings, transcript.pages), sep="\n")
    if calls:
        console.print(report.call_table(calls))
    checks = [*(stage.check for stage in stages), *(call.check for call in calls)]
    console.print("", report.summary(checks, perf_counter() - start), sep="\n", soft_wrap=True)
    return all(check.passed for check in checks)


def make_settings(
    geometry: MLAGeometry, *, prompt: int, tokens: int, format: str, device: str, seed: int
) -> Settings:
    """The settings of a run. Raises ValueError for an unknown format or device."""
    row_codec(format, geometry.row)  # raises for an unknown format
    device_here = choose_device(device, geometry, format)
    return Settings(prompt, tokens, known_format(format), device_here, seed)


def activation_dtype(format: str, geometry: MLAGeometry) -> torch.dtype:
    """The dtype of unquantised rows; bf16 for quantised ones."""
    stored = row_codec(format, geometry.row).payload_dtype
    return stored if stored in FLOATS else torch.bfloat16


def choose_device(wanted: str, geometry: MLAGeometry, format: str) -> torch.device:
    """The device `wanted`; "auto" is a GPU that supports every op of the demo, else the CPU."""
    if wanted not in DEVICES:
        raise ValueError(f"unknown device {wanted!r}; choose from {', '.join(DEVICES)}")
    reasons = []
    for name in ("cuda", "cpu") if wanted == "auto" else (wanted,):
        if (reason := _why_not(torch.device(name), geometry, format)) is None:
            return torch.device(name)
        reasons.append(f"device {name}: {reason}")
    raise ValueError("\n".join(reasons))


def _why_not(device: torch.device, geometry: MLAGeometry, format: str) -> str | None:
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _require_kernels(device, geometry, format)
    except UnsupportedError as unsupported:
        return str(unsupported)
    return None


def _require_kernels(device: torch.device, geometry: MLAGeometry, format: str) -> None:
    """Raise `UnsupportedError` unless every op of the demo has a kernel on `device`."""
    g, where = geometry, device_facts(device)
    dtype = str(activation_dtype(format, geometry))
    widths = (g.qk_nope_head_dim, g.qk_rope_head_dim, g.v_head_dim)
    attention = Problem(*where, dtype, format, g.num_heads, PAGE_SIZE, g.row, widths, CAUSAL.kind)
    ops = ["norm_rope_quant_append", "batched_matmul", "mla_prefill", "merge_states", "mla_decode"]
    for op in ops:
        selection.select(op, attention)
    if g.has_indexer:
        keys = RowShape(g.index_head_dim, 0)
        index = Problem(
            *where, dtype, "fp8_token", g.index_n_heads, PAGE_SIZE, keys, mask=CAUSAL.kind
        )
        selection.select("sparse_mla", attention)
        selection.select("indexer_logits", index)
        selection.select("indexer_topk", Problem(*where, dtype=str(torch.float32)))
        selection.select("physical_rows", Problem(*where, dtype=str(torch.int32)))


def _progress_bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
