"""When a pipeline message crosses hosts: both cost models and the shared ports agree."""

from dataclasses import replace

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.cost.calibrated_cost_model import CalibratedCostModel
from psrl.core.cost.calibration import Calibration, Coefficients, Domain
from psrl.core.cost.cluster import ClusterSpec, ParallelConfig, first_device, pipeline_link
from psrl.core.cost.cost_model import RooflineCostModel
from psrl.core.cost.presets import DEVICES, MODELS
from psrl.sim.replay.stage import Link, Port, SharedPorts
from tests.sim.cases import chains_batch, chains_program, make_plan

MODEL = MODELS["qwen2.5-7b"]
CALIBRATION = Calibration(
    sources=("by hand",),
    coefficients=Coefficients(
        gemm_efficiency=0.5, attention_efficiency=0.5, host_layer_s=0.0, message_efficiency=1.0
    ),
    domain=Domain(device="h100-80", dtype_bytes=2, attention="tree", ranges={}),
)

layouts = st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 3, st.sampled_from([1, 2, 4, 8]))


def layout(tp: int, pp: int, dp: int, per_host: int) -> tuple[ClusterSpec, ParallelConfig]:
    cluster = ClusterSpec(
        device=DEVICES["h100-80"],
        num_hosts=max(1, tp * pp * dp // per_host),
        devices_per_host=per_host,
        intra_host_bytes_per_s=450e9,
        inter_host_bytes_per_s=50e9,
        intra_host_latency_s=5e-6,
        inter_host_latency_s=15e-6,
    )
    return cluster, ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp
    )


@given(layouts)
def test_messages_take_the_link_between_hosts_exactly_when_some_pair_of_stages_needs_it(
    sizes: tuple[int, int, int, int],
) -> None:
    tp, pp, dp, per_host = sizes
    cluster, parallel = layout(*sizes)
    if pp == 1:
        return  # nothing is sent
    host = {
        (rank, stage, tensor): (first_device(parallel, rank, stage) + tensor) // per_host
        for rank in range(dp)
        for stage in range(pp)
        for tensor in range(tp)
    }
    crosses = any(
        host[rank, stage, tensor] != host[rank, stage + 1, tensor]
        for rank, stage, tensor in host
        if stage + 1 < pp
    )
    assert sorted(host.values()) == sorted(d // per_host for d in range(tp * pp * dp))
    expected = 50e9 if crosses else 450e9
    assert pipeline_link(cluster, parallel).bytes_per_s == expected


@given(layouts)
def test_both_cost_models_send_alike(sizes: tuple[int, int, int, int]) -> None:
    cluster, parallel = layout(*sizes)
    roofline = RooflineCostModel(MODEL, cluster, parallel)
    calibrated = CalibratedCostModel(MODEL, cluster, parallel, CALIBRATION)
    assert calibrated.message_s(1000.0) == pytest.approx(roofline.message_s(1000.0))


def test_data_parallel_ranks_lie_between_the_stages() -> None:
    """Two stages of one device would fit one host, but the ranks of a stage come first."""
    cluster, parallel = layout(1, 2, 8, 8)
    assert [first_device(parallel, 0, s) for s in (0, 1)] == [0, 8]
    assert pipeline_link(cluster, parallel).bytes_per_s == 50e9


def test_shared_ports_see_the_same_hosts() -> None:
    batch = chains_batch([3, 3])
    plan = make_plan([chains_program(batch, [[0], [1]])], num_ranks=2, num_stages=2)
    cluster = plan.cluster.model_copy(update={"num_hosts": 2, "devices_per_host": 2})
    ports = SharedPorts(
        type(plan)(**{**vars(plan), "cluster": cluster}),
        nics_per_host=1,
    )
    first, second = (ports.port_of(rank, 0, 1)[0] for rank in range(2))
    assert first is not None
    assert first is second
    assert ports.port_of(0, 1, 0)[0] is not first


@pytest.mark.parametrize(("nics", "repeats"), [(1, 2), (2, 2), (4, 1)])
def test_a_port_carries_a_message_once_per_tensor_parallel_rank_behind_it(
    nics: int, repeats: int
) -> None:
    """Two stages of two tensor-parallel ranks, on two hosts of four devices with the next rank."""
    batch = chains_batch([3, 3])
    plan = make_plan([chains_program(batch, [[0], [1]])], num_ranks=2, num_stages=2)
    parallel = plan.parallel.model_copy(update={"tensor_model_parallel_size": 2})
    cluster = plan.cluster.model_copy(update={"num_hosts": 2, "devices_per_host": 4})
    ports = SharedPorts(replace(plan, cluster=cluster, parallel=parallel), nics_per_host=nics)
    (first, times), (second, _) = (ports.port_of(rank, 0, 1) for rank in range(2))
    assert times == repeats
    assert (first is second) == (nics == 1)


def test_messages_of_two_links_share_a_port_by_hand() -> None:
    """2 s three times, then 1 s once, though both are ready at 0 s; without a port, at once."""
    env, port = simpy.Environment(), Port()
    links = [Link(env, port, repeats=3), Link(env, port), Link(env)]
    arrived: list[tuple[int, float]] = []
    for i, (link, duration_s) in enumerate(zip(links, (2.0, 1.0, 1.5), strict=True)):
        link.send((0, 0), duration_s)
        arrival = link.post((0, 0))
        assert arrival.callbacks is not None
        arrival.callbacks.append(lambda _, i=i: arrived.append((i, env.now)))
    env.run()
    assert arrived == [(2, 1.5), (0, 6.0), (1, 7.0)]
