"""Which links groups of devices use, against lists of the devices in Megatron's order."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.cost.calibrated_cost_model import CalibratedCostModel
from psrl.core.cost.calibration import Calibration, Coefficients, Domain
from psrl.core.cost.cluster import (
    ParallelConfig,
    first_device,
    group_crosses_hosts,
    pipeline_link,
)
from psrl.core.cost.cost_model import RooflineCostModel
from psrl.core.cost.parameters import expert_data_parallel_size
from psrl.core.cost.presets import MODELS
from tests.core.cases import a100_cluster

DENSE, MOE = MODELS["qwen2.5-7b"], MODELS["qwen3-moe-tiny"]


def layout(tp: int, dp: int, pp: int, ep: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=dp,
        expert_model_parallel_size=ep,
    )


def data_parallel_groups(parallel: ParallelConfig) -> list[list[int]]:
    """Devices of one stage and one place in their tensor-parallel groups."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return [
        [first_device(parallel, rank, stage) + t for rank in range(parallel.data_parallel_size)]
        for stage, t in product(range(pp), range(tp))
    ]


def expert_data_parallel_groups(parallel: ParallelConfig) -> list[list[int]]:
    """Devices of one stage and one place in their expert-parallel groups of neighbours."""
    size = parallel.tensor_model_parallel_size * parallel.data_parallel_size
    groups = []
    for stage in range(parallel.pipeline_model_parallel_size):
        first = first_device(parallel, 0, stage)
        by_expert: dict[int, list[int]] = {}
        for device in range(first, first + size):
            place = (device - first) % parallel.expert_model_parallel_size
            by_expert.setdefault(place, []).append(device)
        groups += by_expert.values()
    return groups


def crosses(groups: list[list[int]], devices_per_host: int) -> bool:
    return any(len({device // devices_per_host for device in group}) > 1 for group in groups)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(SIZES, SIZES, SIZES, st.data())
def test_reductions_and_messages_cross_hosts_when_their_devices_do(
    tp: int, dp: int, pp: int, data: st.DataObject
) -> None:
    world = tp * dp * pp
    per_host = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    ep = data.draw(st.sampled_from([n for n in range(1, tp * dp + 1) if tp * dp % n == 0]))
    where, parallel = a100_cluster(world // per_host, per_host), layout(tp, dp, pp, ep)
    assert bool(group_crosses_hosts(where, tp, dp)) == crosses(
        data_parallel_groups(parallel), per_host
    )
    assert bool(group_crosses_hosts(where, ep, expert_data_parallel_size(parallel))) == crosses(
        expert_data_parallel_groups(parallel), per_host
    )
    if pp > 1:
        neighbours = [
            [first_device(parallel, rank, stage + s) + t for s in (0, 1)]
            for rank, stage, t in product(range(dp), range(pp - 1), range(tp))
        ]
        link = pipeline_link(where, parallel)
        assert (link.latency_s == where.inter_host_latency_s) == crosses(neighbours, per_host)


CALIBRATION = Calibration(
    sources=("by hand",),
    coefficients=Coefficients(gemm_efficiency=0.5, attention_efficiency=0.5, host_layer_s=0.0),
    domain=Domain(device="a100-80", dtype_bytes=2, attention="tree", ranges={}),
)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(
    ("num_hosts", "parallel", "num_inside", "num_across"),
    [
        (2, layout(2, 4, 2), 1, 0),
        (2, layout(2, 8, 1), 0, 1),
        (3, layout(2, 3, 4), 0, 1),
        (2, layout(1, 8, 2, ep=4), 2, 0),
        (2, layout(1, 16, 1, ep=8), 0, 2),
        (2, layout(1, 16, 1, ep=16), 0, 1),
    ],
)
def test_cost_models_ask_the_same_function(
    calibrated: bool, num_hosts: int, parallel: ParallelConfig, num_inside: int, num_across: int
) -> None:
    """Two latencies per ring: reduce-scatter and all-gather, with links of endless bandwidth."""
    fast = {"intra_host_bytes_per_s": 1e30, "inter_host_bytes_per_s": 1e30}
    where = a100_cluster(num_hosts, 8).model_copy(update=fast)
    model = MOE if parallel.expert_model_parallel_size > 1 else DENSE
    if calibrated:
        found = CalibratedCostModel(model, where, parallel, CALIBRATION).gradient_reduction_s()
    else:
        found = RooflineCostModel(model, where, parallel).gradient_reduction_s()
    assert found == pytest.approx(2 * (num_inside * 5e-6 + num_across * 15e-6))
