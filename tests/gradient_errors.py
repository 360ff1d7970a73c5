"""Relative L2 errors of the gradients of a model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from psrl.core.run.relative_error import relative_error


def together(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Error of all parameters as one vector."""
    return relative_error(_norm(_differences(found, wanted)), _norm(wanted))


def by_parameter(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Error of each parameter.

    What a parameter's gradient sums is not known here: the gradient of the whole model stands for
    it, as all of its parts come from the same loss through layers that are normalised.
    """
    size = _norm(wanted)
    return {
        name: relative_error(
            float(difference.norm()),
            float(wanted[name].double().norm()),
            size=size,
            epsilon=torch.finfo(wanted[name].dtype).eps,
        )
        for name, difference in _differences(found, wanted).items()
    }


def _differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    assert set(found) == set(wanted)
    return {name: found[name].double() - wanted[name].double() for name in wanted}


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
