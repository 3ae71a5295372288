"""The linear maps of a layer: float weights, or e4m3 with one scale per 128 × 128 block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlakit.dispatch.checks import E4M3
from mlakit.dispatch.knobs import Backend
from mlakit.ops import quantize_fp8, scaled_mm_fp8
from mlakit.steps.weights import BLOCK

SCALE = "weight_scale_inv"  # the parameter of the scales of an e4m3 weight
# modules of transformers whose hooks and forwards place the shards of a weight or note results
HARMLESS = (
    "transformers.integrations.tensor_parallel",  # 5.15
    "transformers.distributed.tensor_parallel",
    "transformers.utils.output_capturing",
)
PLACING = ("accelerate.hooks", "AlignDevicesHook")  # moves the inputs to the device of the weights


class Activations:
    """The input of several linear maps, quantised for those with FP8 weights at most once."""

    def __init__(self, x: Tensor, backend: Backend = "auto") -> None:
        self.x, self.backend = x, backend
        self._quantised: tuple[Tensor, Tensor] | None = None

    def prepare(self, *maps: Linear) -> None:
        """Quantise now if one of the maps needs it: before several streams use the result."""
        if any(each.is_fp8 for each in maps):
            self.quantised()

    def quantised(self) -> tuple[Tensor, Tensor]:
        """(codes, scales) as `scaled_mm_fp8` takes them, one scale per token and 128 columns."""
        if self._quantised is None:
            self._quantised = quantize_fp8(self.x, BLOCK, backend=self.backend)
        return self._quantised


class Linear(nn.Module):
    """y = x Wᵀ + b, with the names of parameters that checkpoints use.

    weight            [outputs, inputs] float, or e4m3
    weight_scale_inv  [ceil(outputs / 128), ceil(inputs / 128)] float32 of an e4m3 weight:
                      value = stored · scale. Activations are quantised per token and 128 columns

    `to(dtype)` of a module converts floats only: an e4m3 weight and its scales stay as they are.
    """

    weight: nn.Parameter
    weight_scale_inv: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        is_fp8: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device}
        weight = torch.empty(outputs, inputs, dtype=dtype, **where)
        self.weight = frozen(weight.to(E4M3) if is_fp8 else weight)
        scale = None
        if is_fp8:
            blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
            scale = frozen(torch.empty(*blocks, dtype=torch.float32, **where))
        self.register_parameter("weight_scale_inv", scale)
        made = frozen(torch.zeros(outputs, dtype=dtype, **where)) if bias else None
        self.register_parameter("bias", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights with rows of about unit length."""
        outputs, inputs = self.weight.shape
        if self.weight.is_meta:
            return
        values = torch.randn(outputs, inputs, dtype=torch.float32, device=self.weight.device)
        with torch.no_grad():
            if self.weight_scale_inv is None:
                self.weight.copy_(values * inputs**-0.5)
            else:
                self.weight.copy_(values.to(E4M3))
                self.weight_scale_inv.fill_(inputs**-0.5)

    @property
    def is_fp8(self) -> bool:
        """Whether the weight is e4m3 with block scales."""
        return self.weight_scale_inv is not None

    def forward(self, x: Tensor | Activations, backend: Backend = "auto") -> Tensor:
        """x [tokens, inputs] → [tokens, outputs] in x's dtype."""
        given = x if isinstance(x, Activations) else Activations(x, backend)
        if self.weight_scale_inv is None:
            return F.linear(given.x, self.weight, self.bias)
        codes, scales = given.quantised()
        y = scaled_mm_fp8(
            codes,
            scales,
            self.weight,
            self.weight_scale_inv,
            n_group=BLOCK,
            k_group=BLOCK,
            out_dtype=given.x.dtype,
            backend=backend,
        )
        return y if self.bias is None else y.add_(self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = (self.weight, self.weight_scale_inv) if self.is_fp8 else ()

        def applied(tensor: Tensor) -> Tensor:
            # a cast of e4m3 codes would leave out their scales
            is_kept = any(tensor is each for each in kept)
            return keep_dtype(fn, tensor) if is_kept else fn(tensor)

        return super()._apply(applied, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Sizes and kind of the weight."""
        outputs, inputs = self.weight.shape
        kind = str(self.weight.dtype).removeprefix("torch.")
        return f"{inputs} → {outputs}, {kind}{', bias' if self.bias is not None else ''}"


class Float32Linear(Linear):
    """A linear map that computes in float32 and keeps its weight so, whatever the layer's dtype.

    It has no place for a bias or for the scales of an e4m3 weight.
    """

    def __init__(self, inputs: int, outputs: int, *, device: torch.device | str | None) -> None:
        super().__init__(inputs, outputs, dtype=torch.float32, device=device)
        for name in ("bias", SCALE):
            del self._parameters[name]
            setattr(self, name, None)

    def forward(
        self, x: Tensor | Activations, backend: Backend = "auto", *, factor: float = 1.0
    ) -> Tensor:
        """x [tokens, inputs] → [tokens, outputs] float32, times `factor` in the same kernel."""
        values = x.x if isinstance(x, Activations) else x
        weight = self.weight.float()
        return torch.addmm(weight[0, :1], values.float(), weight.t(), beta=0, alpha=factor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(lambda t: keep_dtype(fn, t), recurse)


class RMSNorm(nn.Module):
    """x · rsqrt(mean x² + ε) · weight, computed in float32 and rounded once."""

    def __init__(
        self,
        width: int,
        epsilon: float,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = frozen(torch.ones(width, dtype=dtype, device=device))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, width], normalised, in x's dtype."""
        if self.weight.dtype != x.dtype:  # DeepSeek-V4 keeps norms in float32
            weight = self.weight.float()
            return F.rms_norm(x.float(), weight.shape, weight, self.epsilon).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)

    def extra_repr(self) -> str:
        """Width and ε."""
        return f"{len(self.weight)}, epsilon={self.epsilon}"


def does_more_when_called(module: nn.Module) -> bool:
    """Whether a module has hooks or a forward of its own, which a use of its parameters skips.

    Those of `HARMLESS` do not count, nor a forward of accelerate that only moves inputs.
    """
    added = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if "forward" in module.__dict__ and not _only_moves_inputs(module):
        added.append(module.__dict__["forward"])
    return any(getattr(each, "__module__", None) not in HARMLESS for each in added)


def is_offloaded(module: object) -> bool:
    """Whether accelerate fetches the weights of a module for each call, and drops them after it."""
    return bool(getattr(vars(module).get("_hf_hook"), "offload", False))


def _only_moves_inputs(module: nn.Module) -> bool:
    """Whether the forward of a module is accelerate's, with weights that stay where they are."""
    forward, hook = module.__dict__["forward"], module.__dict__.get("_hf_hook")
    before = module.__dict__.get("_old_forward")
    return (
        isinstance(forward, partial)
        and forward.func.__module__ == PLACING[0]
        and (type(hook).__module__, type(hook).__name__) == PLACING
        and not is_offloaded(module)
        and getattr(before, "__func__", None) is type(module).forward
    )


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter of inference: it has no gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def keep_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return the result of `Module._apply` for a tensor, except for a change of dtype."""
    changed = fn(tensor)
    return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)
