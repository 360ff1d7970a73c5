"""Top-k routing in which a shared token counts once for every sample through it.

Losses of a router are sums over the logical tokens of the whole mini-batch on all ranks, per
layer, so they do not depend on how the mini-batch is cut:

* load balancing (Fedus et al., "Switch Transformers", 2022, equation 4, for k choices):
  `E * sum_e f_e * P_e`; f_e is the fraction of the N * k choices that fell on expert e, P_e the
  mean probability of e. f needs all tokens before the first backward, so an update with this loss
  runs a forward without gradients first (`RouterRun.fraction`).
* z-loss (Zoph et al., "ST-MoE", 2022, equation 5): the mean of `logsumexp(logits)^2`.

A choice of experts is discrete: sharing is exact up to rounding as long as no two logits are so
close that rounding decides.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psrl.backend.compat import parallel_state
from psrl.backend.options import RouterOptions
from psrl.core.errors import BackendError
from psrl.core.plan.packing import PackedMicroBatch
from psrl.core.plan.plan import Program
from psrl.core.samples.sample import IntArray
from psrl.core.tree.prefix_tree import PrefixTree


@dataclass
class RouterRun:
    """One run of one program: what its routers need to know, and what they report.

    What a micro-batch reports replaces what it reported before, so a forward may run again.

    Attributes:
        num_layers: of the whole model.
        logical_tokens: tokens of all samples of the program, on all ranks.
        fraction: [layers, experts] share of the choices that fell on each expert; None while
            it is being counted, or when no loss needs it.
    """

    num_layers: int
    num_experts: int
    logical_tokens: int
    options: RouterOptions = field(default_factory=RouterOptions)
    fraction: Tensor | None = None
    _load: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _loss: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def record(self, micro_batch: int, layer: int, load_E: Tensor, loss: Tensor | None) -> None:
        """Report one layer's routing of a micro-batch."""
        self._load[micro_batch, layer] = load_E
        if loss is not None:
            self._loss[micro_batch, layer] = loss.detach()

    def load(self) -> Tensor:
        """[layers, experts] logical tokens that each expert got, over all ranks.

        Every rank must call it.
        """
        load_LE = torch.zeros(self.num_layers, self.num_experts, dtype=torch.float64)
        for (_, layer), load_E in self._load.items():
            load_LE[layer] += load_E.cpu()
        return _sum_over_ranks(load_LE)

    def loss(self) -> float:
        """Router losses of the mini-batch, coefficients included; every rank must call it."""
        own = sum((float(loss) for loss in self._loss.values()), 0.0)
        return float(_sum_over_ranks(torch.tensor([own], dtype=torch.float64)))

    def fractions(self) -> Tensor:
        """[layers, experts] share of the choices of all ranks; every rank must call it."""
        load_LE = self.load()
        return load_LE / load_LE.sum(dim=1, keepdim=True).clamp(min=1.0)


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Every rank routes other tokens or holds other layers."""
    dist.all_reduce(values)
    return values


@dataclass(frozen=True)
class RoutedTokens:
    """What the routers need to know about one micro-batch.

    Attributes:
        multiplicity: [T] samples of the rank through each token, in float64.
    """

    micro_batch: int
    multiplicity: Tensor
    run: RouterRun


def token_multiplicity(
    program: Program, rank: int, tree: PrefixTree, packed: PackedMicroBatch
) -> IntArray:
    """[T] samples of one rank through each token of its micro-batch.

    Args:
        program: the program of all ranks, and `tree` its tree.
    """
    on_rank = program.assignments.rank[tree.sample_order] == rank
    before = np.concatenate([[0], np.cumsum(on_rank)])
    first = tree.first_sample[packed.node]
    through = before[first + tree.samples_through[packed.node]] - before[first]
    return np.repeat(through, packed.num_tokens)


class TreeRouter(torch.nn.Module):
    """Router of one layer: the k largest logits of a token, and their softmax as weights.

    Replaces Megatron's router. It learns which tokens it sees from the attention of its layer,
    which runs just before it in a forward and in a recomputation alike.
    """

    def __init__(self, config: Any, layer: int, attention: Any) -> None:
        super().__init__()
        self.layer = layer
        self.num_experts = config.num_moe_experts
        self.topk = config.moe_router_topk
        shape = (self.num_experts, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self._shares_rows = config.sequence_parallel
        self._attention = (attention,)  # in a tuple: it is no child of this module

    def forward(self, hidden_S1H: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[S, experts] weights, zero where not chosen, and [S, experts] choices."""
        wide = torch.promote_types(hidden_S1H.dtype, torch.float32)
        hidden_SH = hidden_S1H.flatten(0, -2).to(wide)
        logits_SE = torch.nn.functional.linear(hidden_SH, self.weight.to(wide))
        largest, expert = logits_SE.topk(self.topk, dim=-1)
        chosen_SE = torch.zeros_like(logits_SE, dtype=torch.bool).scatter(1, expert, True)
        weights = torch.softmax(largest, dim=-1)
        weights_SE = torch.zeros_like(logits_SE).scatter(1, expert, weights)
        tokens = self._attention[0].params.routed
        if tokens is not None:
            weights_SE = self._account(tokens, logits_SE, chosen_SE, weights_SE)
        return weights_SE, chosen_SE

    def _account(
        self, tokens: RoutedTokens, logits_SE: Tensor, chosen_SE: Tensor, weights_SE: Tensor
    ) -> Tensor:
        run = tokens.run
        counts_S = self._own_rows(tokens.multiplicity, len(logits_SE))
        load_E = counts_S @ chosen_SE.double()
        loss = None
        if torch.is_grad_enabled():
            loss = router_loss(run, self.layer, logits_SE, counts_S.to(logits_SE))
        run.record(tokens.micro_batch, self.layer, load_E, loss)
        return weights_SE if loss is None else _AddLoss.apply(weights_SE, loss)

    def _own_rows(self, multiplicity_T: Tensor, num_rows: int) -> Tensor:
        """[S] multiplicities of this rank's rows; rows that fill up the last rank's count zero."""
        first = num_rows * parallel_state.get_tensor_model_parallel_rank() * self._shares_rows
        own = multiplicity_T[first : first + num_rows]
        return torch.nn.functional.pad(own, (0, num_rows - len(own)))


def router_loss(run: RouterRun, layer: int, logits_SE: Tensor, counts_S: Tensor) -> Tensor | None:
    """One layer's share of the router losses by S tokens; None if no loss is asked for.

    Raises:
        BackendError: if the load-balancing loss is asked for and the fractions are not known.
    """
    terms = []
    if run.options.z_coefficient:
        squared_S = torch.logsumexp(logits_SE, dim=-1).square()
        terms.append(run.options.z_coefficient * (counts_S * squared_S).sum())
    if run.options.balance_coefficient:
        if run.fraction is None:
            raise BackendError(
                "the load-balancing loss needs the fractions of the whole mini-batch",
                "run the program without gradients first and pass RouterRun.fractions() on",
            )
        fraction_E = run.fraction[layer].to(logits_SE)
        mean_E = (counts_S[:, None] * torch.softmax(logits_SE, dim=-1)).sum(dim=0)
        scale = run.options.balance_coefficient * run.num_experts
        terms.append(scale * (fraction_E * mean_E).sum())
    return sum(terms[1:], terms[0]) / run.logical_tokens if terms else None


class _AddLoss(torch.autograd.Function):
    """Identity; the backward also starts the backward of a loss, with gradient one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, gradient.new_ones(())


def forward_order(mine: Program) -> list[int]:
    """Micro-batches of one rank in the order of their forwards."""
    return [op.micro_batch for op in mine.ops() if op.kind == "forward"]


def rows_to_exchange(program: Program, rank: int, coupled_ranks: int) -> dict[int, int]:
    """Rows of each of a rank's micro-batches such that ranks which share experts have equally many.

    The all-gather dispatcher needs it; the all-to-all one does not (`coupled_ranks` 1). A step
    without tokens has one row all the same: Megatron's attention cannot run without.

    Args:
        program: the program of all ranks, of one op pattern.
    """
    first = rank - rank % coupled_ranks
    sizes = []
    for member in range(first, first + coupled_ranks):
        table = program.on_rank(member).micro_batches
        size = dict(zip(table.micro_batch.tolist(), table.num_tokens.tolist(), strict=True))
        sizes.append([size[m] for m in forward_order(program.on_rank(member))])
    most = [max(1, *at) for at in zip(*sizes, strict=True)]
    return dict(zip(forward_order(program.on_rank(rank)), most, strict=True))
