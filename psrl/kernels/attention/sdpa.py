"""Tree attention by torch's fused operator with a dense mask: a second, independent reference.

On a GPU it is also what the Triton kernels are measured against. Memory grows with T times S.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from psrl.core.plan.packing import PackedMicroBatch

from .reference import JoinCached
from .store import KeyValueStore
from .visibility_rule import visibility


def sdpa_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    packed: PackedMicroBatch,
    store: KeyValueStore | None = None,
    layer: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention of a packed micro-batch; arguments and gradients as in `tree_attention`.

    Returns:
        [T, H, D] outputs.

    Raises:
        PlanError: if the tokens are not packed in depth-first order.
    """
    rule = visibility(packed)
    k_SGD, v_SGD = JoinCached.apply(k_TGD, v_TGD, store, layer, rule.runs, packed.cached)
    visible_TS = torch.from_numpy(rule.mask(packed.total_tokens)).to(q_THD.device)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SGD, v_SGD))
    out = scaled_dot_product_attention(q, k, v, attn_mask=visible_TS, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
