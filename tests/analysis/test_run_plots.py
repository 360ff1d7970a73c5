"""Iteration stack, throughput and micro-batch times of a comparison; curves of a sweep."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from psrl.analysis.figures import run_plots
from psrl.analysis.figures.sweep_plots import prefix_rate, scaling, write_sweep_figures
from psrl.analysis.report.comparison import load_comparison
from psrl.analysis.report.report import write_figures
from tests.analysis.conftest import edit_json


def texts(fig: Figure) -> list[str]:
    return [t.get_text() for ax in fig.axes for t in ax.texts]


def test_the_stack_ends_at_the_time_of_the_iteration(comparison_run: Path) -> None:
    data = run_plots.iteration_series(load_comparison(comparison_run))
    assert data["phase"].tolist() == ["log_old_prob", "reference", "update"] * 2
    assert data["makespan_s"].tolist() == [4.0, 4.0, 12.0, 2.0, 2.0, 5.0]
    fig = run_plots.iteration_stack(data)
    ends = [bar.get_x() + bar.get_width() for bar in fig.axes[0].patches]
    assert ends == [4, 8, 20, 2, 4, 9]
    assert {"20.0 s", "9.00 s"} <= set(texts(fig))


def test_a_known_rollout_comes_first(comparison_run: Path) -> None:
    for policy in ("verl", "psrl"):
        path = comparison_run / "policies" / policy / "metrics.json"
        edit_json(path, lambda metrics: metrics.update(iteration={"rollout_s": 30.0}))
    data = run_plots.iteration_series(load_comparison(comparison_run))
    assert data["phase"].tolist()[::4] == ["rollout", "rollout"]
    assert "39.0 s" in texts(run_plots.iteration_stack(data))


def test_throughput_shows_both_rates(comparison_run: Path) -> None:
    data = run_plots.throughput_series(load_comparison(comparison_run))
    assert data["logical_tokens_per_s"].tolist() == [3e6 / 20, 3e6 / 9]
    fig = run_plots.throughput(data)
    widths = [[bar.get_width() for bar in ax.patches] for ax in fig.axes]
    np.testing.assert_allclose(np.divide(*widths[0]), 9 / 20)
    assert [ax.get_title("left") for ax in fig.axes] == ["logical tokens", "unique tokens"]


def test_micro_batches_are_those_of_the_slowest_ranks_last_stage(comparison_run: Path) -> None:
    data = run_plots.micro_batch_series(load_comparison(comparison_run))
    verl = data[data["policy"] == "verl"]
    # Rank 1 of verl takes 11/9 as long; its last stage runs forward, backward, twice.
    assert set(verl["rank"]) == {1}
    assert verl["op"].tolist() == ["forward", "backward"] * 2
    np.testing.assert_allclose(verl["duration_s"], np.array([1, 2, 1, 2]) * 11 / 9)
    fig = run_plots.micro_batch_times(data, "update")
    assert [ax.get_title("left") for ax in fig.axes] == [
        "verl: rank 1, 4 ops",
        "psrl: rank 0, 4 ops",
    ]
    assert fig.axes[0].get_title("right") == "largest over mean: forward 1.00x, backward 1.00x"


@pytest.mark.slow
def test_every_figure_is_written_three_times(comparison_run: Path) -> None:
    drawn = write_figures(load_comparison(comparison_run))
    assert {"iteration_stack", "throughput", "micro_batch_times"} <= set(drawn)
    for png in drawn.values():
        assert all(png.with_suffix(kind).stat().st_size > 0 for kind in (".png", ".svg", ".csv"))


@pytest.fixture
def sweep() -> pd.DataFrame:
    """Two traces on 8 and 16 devices; psrl does not fit on 16 with the second one."""
    rows = []
    for trace, match in (("a", 0.5), ("b", 0.9)):
        for devices in (8, 16):
            for policy, gain in (("verl", 1.0), ("psrl", 0.8 / (1 - match))):
                fits = (trace, devices, policy) != ("b", 16, "psrl")
                rows.append(
                    {
                        "trace": trace,
                        "num_devices": devices,
                        "policy": policy,
                        "prefix_match_rate": match,
                        "makespan_s": 8 / devices / gain if fits else np.nan,
                        "speedup": gain if fits else np.nan,
                        "speedup_bound": {"a": 2.5, "b": 12.0}[trace],
                        "logical_tokens_per_s": 1e6 * gain * devices**0.5,
                    }
                )
    return pd.DataFrame(rows)


def test_scaling_shows_efficiency_per_device(sweep: pd.DataFrame) -> None:
    fig = scaling(sweep[sweep["trace"] == "a"])
    whole, share = fig.axes
    lines = [line for line in share.lines if len(line.get_xdata()) == 2][:2]
    for line in lines:
        np.testing.assert_allclose(np.asarray(line.get_ydata()), [100, 100 / 2**0.5])
    assert len(whole.lines) == 4  # a curve and its proportion per policy


def test_the_bound_is_that_of_each_trace(sweep: pd.DataFrame) -> None:
    fig = prefix_rate(sweep[sweep["num_devices"] == 8])
    bound, _, psrl = fig.axes[0].lines
    np.testing.assert_allclose(np.asarray(bound.get_xdata()), [2, 10])
    np.testing.assert_allclose(np.asarray(bound.get_ydata()), [2.5, 12])
    np.testing.assert_allclose(np.asarray(psrl.get_xdata()), [2, 10])
    np.testing.assert_allclose(np.asarray(psrl.get_ydata()), [1.6, 8])


@pytest.mark.slow
def test_a_sweep_draws_what_it_varies(sweep: pd.DataFrame, tmp_path: Path) -> None:
    drawn = write_sweep_figures(sweep, tmp_path / "all")
    assert set(drawn) == {"scaling_a", "scaling_b", "prefix_rate"}
    written = pd.read_csv(tmp_path / "all" / "scaling_b.csv")
    assert len(written) == 3  # without the plan that does not fit
    one = sweep[(sweep["trace"] == "a")]
    assert set(write_sweep_figures(one, tmp_path / "one")) == {"scaling"}
    assert write_sweep_figures(one[one["num_devices"] == 8], tmp_path / "none") == {}
