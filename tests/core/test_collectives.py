"""Rings over devices of one or several hosts, by hand."""

import numpy as np
import pytest

from psrl.core.cost.cluster import ClusterSpec
from psrl.core.cost.collectives import ring_s
from psrl.core.cost.presets import DEVICES


def hosts(num_hosts: int, inside: float = 400.0, across: float = 50.0) -> ClusterSpec:
    return ClusterSpec(
        device=DEVICES["h100-80"],
        num_hosts=num_hosts,
        devices_per_host=8,
        intra_host_bytes_per_s=inside,
        inter_host_bytes_per_s=across,
        intra_host_latency_s=0.0,
        inter_host_latency_s=0.0,
    )


@pytest.mark.parametrize(
    ("stride", "size", "rate"),
    [
        (1, 8, 400.0),  # one host
        (1, 16, 400.0),  # eight ports of each host
        (2, 8, 200.0),  # the two rings of a host share them
        (8, 2, 50.0),  # one device of each host
    ],
)
def test_devices_of_a_ring_on_one_host_use_all_of_their_ports(
    stride: int, size: int, rate: float
) -> None:
    expected_s = (size - 1) / size * 1000.0 / rate
    assert float(ring_s(hosts(2), 1000.0, stride, size)) == pytest.approx(expected_s)


def test_ports_are_no_faster_than_the_links_behind_them() -> None:
    slow_inside = hosts(2, inside=300.0)
    expected_s = 15 / 16 * 1000.0 / 300.0
    assert float(ring_s(slow_inside, 1000.0, 1, 16)) == pytest.approx(expected_s)


def test_one_device_reduces_nothing() -> None:
    stride, size = np.array([1, 4, 16]), np.array([1, 1, 1])
    np.testing.assert_array_equal(ring_s(hosts(2), 1000.0, stride, size), 0.0)
