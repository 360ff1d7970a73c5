"""Main gradients in float32 or wider, their reduction over ranks, and sharded AdamW.

Gradients of a stage lie in one flat buffer with a region for the parameters that all data-parallel
ranks hold and one for those of the rank's experts. AdamW is sharded as in ZeRO stage 1 (Rajbhandari
et al., 2020): of each region a rank keeps main weights, momentum and variance of an equal share,
updates it, and the ranks exchange the updated weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from psrl.backend.model.parameters import (
    ParallelGroups,
    group_size,
    has_partial_gradient,
    is_expert,
    sharded_dim,
    stage_parameters,
)
from psrl.backend.options import OptimizerOptions

STATES = ("main", "exp_avg", "exp_avg_sq")
"""What AdamW keeps per parameter: main weight, momentum and variance."""


class FlatRegion:
    """Parameters that the ranks of one group hold alike, one after the other.

    Attributes:
        parameters: by canonical name.
        group: the ranks that hold the same parameters.
        size: elements, filled up to a multiple of the group's size.
    """

    def __init__(
        self, named: list[tuple[str, torch.nn.Parameter]], group: dist.ProcessGroup | None
    ) -> None:
        self.parameters = dict(named)
        self.group = group
        total = sum(p.numel() for p in self.parameters.values())
        self.size = total + -total % group_size(group)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor of this region by canonical name, in the parameters' shapes."""
        views, start = {}, 0
        for name, parameter in self.parameters.items():
            views[name] = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        return views

    def own_of(self, named: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """This rank's share of what `split` would give, without the whole.

        Args:
            like: of the share's dtype and device.
        """
        own = self.own(like).clone().zero_()
        share, start = len(own), 0
        first = share * (0 if self.group is None else self.group.rank())
        for name, parameter in self.parameters.items():
            low, high = max(start, first), min(start + parameter.numel(), first + share)
            if low < high:
                values = named[name].detach().reshape(-1)
                own[low - first : high - first] = values[low - start : high - start]
            start += parameter.numel()
        return own

    def own(self, flat: Tensor) -> Tensor:
        """This rank's share of a flat tensor of this region."""
        share = self.size // group_size(self.group)
        rank = 0 if self.group is None else self.group.rank()
        return flat[rank * share : (rank + 1) * share]

    def whole(self, own: Tensor) -> Tensor:
        """The flat tensor of which every rank of the group passes its share."""
        if group_size(self.group) == 1:
            return own
        flat = own.new_empty(self.size)
        shares = list(flat.chunk(group_size(self.group)))
        dist.all_gather(shares, own.contiguous(), group=self.group)
        return flat


class MainGradients:
    """Gradients of a stage's parameters in one flat buffer, added up over micro-batches.

    Each parameter's gradient moves into the buffer as soon as autograd has finished it, so no
    gradient in the working precision is kept.

    Attributes:
        regions: shared parameters, then experts; the second is often empty.
    """

    def __init__(self, module: torch.nn.Module, groups: ParallelGroups | None = None) -> None:
        self.groups = ParallelGroups() if groups is None else groups
        named = stage_parameters(module)
        self.regions = (
            FlatRegion([item for item in named if not is_expert(item[0])], self.groups.data),
            FlatRegion([item for item in named if is_expert(item[0])], self.groups.expert_data),
        )
        first = named[0][1]
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._flat = torch.zeros(
            sum(region.size for region in self.regions), dtype=dtype, device=first.device
        )
        views: dict[str, Tensor] = {}
        for region, flat in zip(self.regions, self.flats, strict=True):
            views |= region.split(flat)
        self._views = {name: views[name] for name, _ in named}
        self._parameters = dict(named)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_AddTo(self._views[name]))
            for name, parameter in named
        ]

    @property
    def flats(self) -> tuple[Tensor, ...]:
        """The flat gradient of each region."""
        return self._flat.split([region.size for region in self.regions])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Canonical names and gradients of the rank's slices."""
        return iter(self._views.items())

    def zero(self) -> None:
        self._flat.zero_()

    def reduce(self) -> None:
        """Sum over the ranks that hold a parameter alike but saw other samples, rows or heads.

        The two copies of a weight that embedding and head share across stages get one gradient.
        """
        for region, flat in zip(self.regions, self.flats, strict=True):
            if region.size and group_size(region.group) > 1:
                dist.all_reduce(flat, group=region.group)
        for name, view in self:
            parameter = self._parameters[name]
            partial = has_partial_gradient(name, parameter) and not is_expert(name)
            if partial and group_size(self.groups.tensor) > 1:
                dist.all_reduce(view, group=self.groups.tensor)
            copied = getattr(parameter, "shared_embedding", False)
            if copied and group_size(self.groups.embedding) > 1:
                dist.all_reduce(view, group=self.groups.embedding)

    def norm(self) -> float:
        """L2 norm of the full gradient of the model; every parameter counts once."""
        tensor_size = group_size(self.groups.tensor)
        shared, experts = self._flat.new_zeros(2, dtype=torch.float64)
        for name, view in self:
            # In float64 from the start: a square leaves float32 from 2e19 on.
            square = torch.linalg.vector_norm(view, dtype=torch.float64).square()
            if is_expert(name):
                experts += square
            elif not getattr(self._parameters[name], "shared", False):
                shared += square if sharded_dim(name) is not None else square / tensor_size
        _all_reduce([shared], self.groups.tensor)
        _all_reduce([experts], self.groups.expert)
        total = shared + experts
        _all_reduce([total], self.groups.pipeline)
        return float(total.sqrt())

    def first_nonfinite(self) -> str | None:
        """The first parameter of this rank whose gradient is not finite."""
        return next((name for name, view in self if not bool(view.isfinite().all())), None)

    def scale(self, factor: float) -> None:
        self._flat *= factor

    def tensors(self) -> list[Tensor]:
        """The tensors that hold all gradients."""
        return [self._flat]

    def remove_hooks(self) -> None:
        """Detach from the model."""
        for hook in self._hooks:
            hook.remove()


def _all_reduce(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    if group_size(group) > 1:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


class _AddTo:
    """Autograd hook: move a finished gradient into its view of the flat buffer."""

    def __init__(self, view: Tensor) -> None:
        self._view = view

    def __call__(self, parameter: Tensor) -> None:
        self._view += parameter.grad
        parameter.grad = None


class MainAdamW:
    """AdamW on this rank's share of main weights, in the gradients' precision.

    The model gets rounded copies of the main weights.
    """

    def __init__(self, gradients: MainGradients, options: OptimizerOptions) -> None:
        self._options = options
        self._gradients = gradients
        self._main = []
        for region, flat in zip(gradients.regions, gradients.flats, strict=True):
            self._main.append(region.own_of(region.parameters, flat).requires_grad_())
        self._adamw = torch.optim.AdamW(
            self._main,
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
            weight_decay=options.weight_decay,
        )
        # From the start, so that a model that trains has all its memory before its first step.
        for main in self._main:
            self._set_state(main, 0, {kind: torch.zeros_like(main) for kind in STATES[1:]})

    def _set_state(self, main: Tensor, num_steps: int, moments: dict[str, Tensor]) -> None:
        # Torch counts the steps of each tensor in a tensor of its own.
        step = torch.tensor(float(num_steps), dtype=torch.float32)
        self._adamw.state[main] = {"step": step, **moments}

    def step(self, gradient_norm: float) -> None:
        """One update; scales the gradients if their norm exceeds the limit. They are zero then."""
        limit = self._options.max_gradient_norm
        if gradient_norm > limit:
            self._gradients.scale(limit / gradient_norm)
        regions = self._gradients.regions
        for region, flat, main in zip(regions, self._gradients.flats, self._main, strict=True):
            main.grad = region.own(flat)
        self._adamw.step()
        for main in self._main:
            main.grad = None
        self._publish()
        self._gradients.zero()

    @torch.no_grad()
    def _publish(self) -> None:
        """Give the model the updated weights of all ranks."""
        for region, main in zip(self._gradients.regions, self._main, strict=True):
            if not region.size:
                continue
            dtype = next(iter(region.parameters.values())).dtype
            for name, view in region.split(region.whole(main.to(dtype))).items():
                region.parameters[name].copy_(view)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Torch's, for a scheduler that changes the learning rate or the weight decay."""
        return self._adamw.param_groups

    def tensors(self) -> list[Tensor]:
        """This rank's main weights, momentum and variance."""
        states = (t for s in self._adamw.state.values() for t in s.values())
        return [*self._main, *(t for t in states if isinstance(t, Tensor) and t.dim())]

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        states = self._adamw.state.values()
        return int(max((float(s["step"]) for s in states), default=0.0))

    @torch.no_grad()
    def state(self, kind: str) -> dict[str, Tensor]:
        """One of `STATES` of all the stage's slices by canonical name.

        Every rank of the data-parallel groups must call it.
        """
        named: dict[str, Tensor] = {}
        for region, main in zip(self._gradients.regions, self._main, strict=True):
            if region.size:
                own = main.detach() if kind == "main" else self._adamw.state[main][kind]
                named |= region.split(region.whole(own))
        return named

    @torch.no_grad()
    def restore(self, states: dict[str, dict[str, Tensor]], num_steps: int) -> None:
        """Take over states as `state` gives them, and give the model its weights.

        Args:
            states: for each of `STATES`, all the stage's slices by canonical name.
        """
        for region, flat, main in zip(
            self._gradients.regions, self._gradients.flats, self._main, strict=True
        ):
            own = {kind: region.own_of(states[kind], flat) for kind in STATES}
            main.copy_(own.pop("main"))
            self._set_state(main, num_steps, own)
        self._publish()
