"""A lower bound on the most loaded rank, with what it takes to verify it from the trace."""

from typing import Literal

from pydantic import Field, FiniteFloat

from psrl.core.cost.cluster import Spec

BoundKind = Literal[
    "average work",
    "longest sample",
    "forced copies",
    "group configurations",
    "leaf configurations",
    "enumeration",
]


class Bound(Spec):
    """No placement of a program's samples gives every rank less work than `limit_s`.

    Each sample is on one rank. The work of a rank is the tokens on the root paths of its samples
    and the rows that they predict, each once, in seconds of `psrl.core.cost.unit_costs`, all
    phases of the program together. Whatever holds for some of the samples holds for all.

    Attributes:
        kind: what proves it; docs/plan-format.md has the proofs.
        samples: of an enumeration, the positions in `assignments` of the samples that it places.
        nodes: of leaf configurations, nodes of the tree in which all samples share.
        prices: one per node; of group configurations one per group and one for loose rows.
    """

    kind: BoundKind
    limit_s: FiniteFloat = Field(ge=0.0)
    samples: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    prices: tuple[FiniteFloat, ...] = ()
