"""Main gradients in float32 or wider, their reduction over ranks, and AdamW on main weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .parameters import has_partial_gradient, layout


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter, 2019), with clipping by the global gradient norm.

    Attributes:
        max_gradient_norm: scale gradients down to this norm; None never does.
    """

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float | None = 1.0


class MainGradients:
    """Gradients of a model's parameters in one flat buffer, added up over micro-batches.

    Each parameter's gradient moves into the buffer as soon as autograd has finished it, so no
    gradient in the working precision is kept.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._named = list(module.named_parameters())
        dtype = torch.promote_types(self._named[0][1].dtype, torch.float32)
        total = sum(p.numel() for _, p in self._named)
        self._flat = torch.zeros(total, dtype=dtype, device=self._named[0][1].device)
        self._views: dict[str, Tensor] = {}
        self._hooks = []
        start = 0
        for name, parameter in self._named:
            view = self._flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            self._views[name] = view
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_AddTo(view)))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and gradients of the rank's slices."""
        return iter(self._views.items())

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def zero(self) -> None:
        self._flat.zero_()

    def reduce(self, data_parallel: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup) -> None:
        """Sum over data-parallel ranks, and over heads where ranks see only their own."""
        if data_parallel.size() > 1:
            dist.all_reduce(self._flat, group=data_parallel)
        if tensor_parallel.size() > 1:
            for name, view in self:
                if has_partial_gradient(name):
                    dist.all_reduce(view, group=tensor_parallel)

    def norm(self, tensor_parallel: dist.ProcessGroup) -> float:
        """L2 norm of the full gradient; replicated parameters count once."""
        size = tensor_parallel.size()
        square = torch.zeros((), dtype=torch.float64, device=self._flat.device)
        for name, view in self:
            own = view.square().sum(dtype=torch.float64)
            square += own if layout(name) is not None else own / size
        if size > 1:
            dist.all_reduce(square, group=tensor_parallel)
        return float(square.sqrt())

    def scale(self, factor: float) -> None:
        self._flat *= factor

    def remove_hooks(self) -> None:
        """Detach from the model."""
        for hook in self._hooks:
            hook.remove()


class _AddTo:
    """Autograd hook: move a finished gradient into its view of the flat buffer."""

    def __init__(self, view: Tensor) -> None:
        self._view = view

    def __call__(self, parameter: Tensor) -> None:
        self._view += parameter.grad
        parameter.grad = None


class MainAdamW:
    """AdamW on weights in the gradients' precision; the model gets rounded copies."""

    def __init__(
        self, module: torch.nn.Module, gradients: MainGradients, options: OptimizerOptions
    ) -> None:
        self._options = options
        self._gradients = gradients
        self._pairs = []
        views = dict(gradients)
        for name, parameter in module.named_parameters():
            view = views[name]
            same = parameter.dtype == view.dtype
            main = parameter if same else parameter.detach().to(view.dtype).requires_grad_()
            self._pairs.append((parameter, main, view))
        self._adamw = torch.optim.AdamW(
            [main for _, main, _ in self._pairs],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
            weight_decay=options.weight_decay,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of momentum, variance and separate main weights."""
        states = sum(
            value.nbytes
            for state in self._adamw.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        return states + sum(main.nbytes for p, main, _ in self._pairs if main is not p)

    def step(self, gradient_norm: float) -> None:
        """One update; scales the gradients if their norm exceeds the limit."""
        limit = self._options.max_gradient_norm
        if limit is not None and gradient_norm > limit:
            self._gradients.scale(limit / gradient_norm)
        for _, main, view in self._pairs:
            main.grad = view
        self._adamw.step()
        for parameter, main, _ in self._pairs:
            main.grad = None
            if main is not parameter:
                with torch.no_grad():
                    parameter.copy_(main)
