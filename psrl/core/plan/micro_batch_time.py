"""What the micro-batch table says of time: the slowest stage's, without waiting."""

import numpy as np

from psrl.core.cost.cost_model import CostModel
from psrl.core.samples.sample import FloatArray, IntArray, StrArray


def micro_batch_times(
    cost: CostModel,
    num_tokens: IntArray,
    pairs: IntArray,
    head_tokens: IntArray,
    activation: StrArray,
) -> tuple[FloatArray, FloatArray]:
    """`forward_s` and `backward_s`; a backward repeats what its micro-batch recomputes.

    Args:
        num_tokens, pairs, head_tokens, activation: [M] columns of the table.
    """
    sizes = [a.astype(np.float64) for a in (num_tokens, pairs, head_tokens)]
    again = np.where(activation == "recompute", cost.forward_s(sizes[0], sizes[1], 0.0), 0.0)
    forward_s = np.asarray(cost.forward_s(*sizes), np.float64)
    return forward_s, np.asarray(cost.backward_s(*sizes) + again, np.float64)
