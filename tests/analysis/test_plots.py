from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from psrl.analysis.figures import plots, series
from psrl.analysis.figures.style import POLICY_COLOURS, save_figure, style
from psrl.analysis.report.comparison import load_comparison
from psrl.analysis.units import bytes_unit, number, percent, time_unit, times, tokens_unit
from psrl.core.cost.cluster import ParallelConfig
from psrl.core.plan.bytes_over_ops import MemoryState
from psrl.core.plan.policy_names import POLICY_ORDER
from psrl.core.run.events import EventLog
from psrl.core.run.metrics import phase_metrics
from tests.analysis.conftest import GIB, edit_json, make_events

FIGURES = (
    "gain",
    "factors",
    "memory_over_time",
    "worker_times",
    "timeline",
    "tokens",
    "predicted_vs_measured",
)


def draw(run: Path, name: str) -> tuple[Figure, pd.DataFrame]:
    comparison = load_comparison(run)
    make_data = {
        "gain": series.gain_series,
        "factors": series.factors_series,
        "memory_over_time": series.memory_series,
        "worker_times": series.worker_series,
        "timeline": series.timeline_series,
        "tokens": series.token_series,
        "predicted_vs_measured": series.predicted_series,
    }
    data = make_data[name](comparison)
    figures = {
        "gain": lambda: plots.gain(data, "verl"),
        "factors": lambda: plots.factors(data, "verl"),
        "memory_over_time": lambda: plots.memory_over_time(data, "update", 80 * GIB),
        "worker_times": lambda: plots.worker_times(data, "update"),
        "timeline": lambda: plots.timeline(data, "update"),
        "tokens": lambda: plots.tokens(data),
        "predicted_vs_measured": lambda: plots.predicted_vs_measured(data),
    }
    return figures[name](), data


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_saving_twice_gives_equal_bytes_and_leaves_the_settings_alone(
    executed_run: Path, tmp_path: Path, name: str
) -> None:
    before = dict(mpl.rcParams)
    for folder in ("a", "b"):
        fig, data = draw(executed_run, name)
        assert save_figure(fig, data, tmp_path / folder, name) == tmp_path / folder / f"{name}.png"
    assert dict(mpl.rcParams) == before
    for suffix in ("png", "svg", "csv"):
        a, b = ((tmp_path / folder / f"{name}.{suffix}").read_bytes() for folder in ("a", "b"))
        assert a == b
        assert len(a) > 100
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "a" / f"{name}.csv"), data, check_dtype=False, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_axes_have_units_and_no_text_is_cut_off(executed_run: Path, name: str) -> None:
    fig, _ = draw(executed_run, name)
    with style():
        canvas = FigureCanvasAgg(fig)
        canvas.draw()
        box = fig.get_tightbbox(canvas.get_renderer())
    assert box.x0 > -0.01
    assert box.y0 > -0.01
    assert box.x1 < fig.get_figwidth() + 0.01
    assert box.y1 < fig.get_figheight() + 0.01
    labels = [ax.get_xlabel() for ax in fig.axes if ax.get_xlabel()]
    assert labels
    assert all(label.endswith(")") for label in labels)


def test_gain_series(comparison_run: Path) -> None:
    data = series.gain_series(load_comparison(comparison_run)).set_index(["part", "policy"])
    psrl = data.xs("psrl", level="policy")
    assert psrl["speedup"].to_dict() == {
        "update": 2.4,
        "forward phases": 2.0,
        "end to end": 20 / 9,
    }
    assert psrl["flop_ratio"].tolist() == [4.0] * 3
    assert psrl["speedup_bound"].tolist() == [12 / 3, 8 / 2, 20 / 5]
    assert data.xs("verl", level="policy")["speedup"].tolist() == [1.0] * 3


def test_equal_phases_share_a_panel(comparison_run: Path) -> None:
    comparison = load_comparison(comparison_run)
    factors = series.factors_series(comparison)
    assert factors["phases"].tolist() == ["update", "log_old_prob, reference"]
    assert factors["sharing"].tolist() == [2.0, 2.5]
    tokens = series.token_series(comparison)
    assert tokens["phases"].tolist() == ["update"] * 2 + ["log_old_prob, reference"] * 2
    assert tokens["executed_tokens"].tolist() == [1_000_000, 320_000, 1_000_000, 300_000]


def test_memory_series_follows_the_fullest_device(comparison_run: Path) -> None:
    data = series.memory_series(load_comparison(comparison_run))
    mine = data[data["policy"] == "psrl"]
    total = mine[mine["view"] == "all memory"]
    assert set(zip(total["rank"], total["stage"], strict=True)) == {(1, 0)}
    assert total["time_s"].tolist() == [0.0, 0.5, 2.0, 3.5, 4.5, 5.0]
    expected = [45, 40 + 10 + 2, 45 + 2, 40 + 10 + 2 + 2, 40, 40]
    assert (total["bytes"] / GIB).tolist() == expected
    assert (total["static_bytes"] / GIB).tolist() == [40] * 6
    cached = mine[mine["view"] == "cached keys and values"]
    assert (cached["bytes"] / GIB).tolist() == [0, 2, 2, 4, 0, 0]


def test_timeline_keeps_the_slowest_and_the_fastest_rank(
    comparison_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = load_comparison(comparison_run)
    whole = series.timeline_series(comparison)
    assert set(whole["policy"]) == {"verl", "psrl"}
    assert set(whole["op"]) == {"forward", "backward", "optimizer_step"}
    monkeypatch.setattr(series, "MAX_TIMELINE_ROWS", 2)
    cut = series.timeline_series(comparison)
    assert set(cut[cut["policy"] == "verl"]["rank"]) == {1}


def test_an_early_finish_is_enlarged(comparison_run: Path) -> None:
    fig, _ = draw(comparison_run, "timeline")
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["verl", "psrl", "psrl, enlarged"]
    ends = [ax.get_xlim()[1] for ax in fig.axes]
    assert ends[0] == ends[1] > 2 * ends[2]


def test_predicted_series_is_relative_to_the_executed_time(executed_run: Path) -> None:
    data = series.predicted_series(load_comparison(executed_run)).set_index(["policy", "phase"])
    assert data.loc[("verl", "update"), "error"] == pytest.approx(1 / 1.1 - 1)
    assert data.loc[("psrl", "update"), "error"] == 0.0


def test_worker_times_are_those_of_the_metrics(comparison_run: Path) -> None:
    data = series.worker_series(load_comparison(comparison_run))
    assert data[data["policy"] == "verl"]["worker_time_s"].tolist() == [9.0, 11.0]
    assert data[data["policy"] == "psrl"]["worker_time_s"].tolist() == [4.5, 4.5]
    assert data["bubble_fraction"].tolist() == [0.2, 0.2, 0.08, 0.08]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0, 9), st.floats(0.1, 3)),
        min_size=1,
        max_size=20,
    )
)
def test_worker_times_agree_with_the_metrics(rows: list[tuple[int, int, float, float]]) -> None:
    log = EventLog()
    for program, rank, start, length in sorted(rows):
        log.add(
            "update",
            program,
            rank,
            0,
            "forward",
            0,
            1,
            start,
            start + length,
            MemoryState(*[0] * 5),
        )
    events = log.finish()
    parallel = ParallelConfig(data_parallel_size=4)
    metrics = phase_metrics(events, "update", parallel, 1, 1)
    times_s = series.worker_times(events, 4)
    assert len(times_s) == 4
    assert times_s.min() == pytest.approx(metrics["worker_time_min_s"])
    assert times_s.max() == pytest.approx(metrics["worker_time_max_s"])


@pytest.mark.slow
def test_figures_survive_a_rank_without_work_and_a_forward_only_run(
    comparison_run: Path, tmp_path: Path
) -> None:
    events = make_events(1.0, 1.0, 0)
    busy = (events.rank == 0) & (events.phase != "update")
    for policy in ("verl", "psrl"):
        folder = comparison_run / "policies" / policy
        events.where(busy).save(folder / "events.parquet")
        edit_json(folder / "metrics.json", lambda metrics: metrics["phases"].pop("update"))
    for name in FIGURES[:-1]:
        fig, data = draw(comparison_run, name)
        save_figure(fig, data, tmp_path, name)
    texts = [t.get_text() for t in draw(comparison_run, "worker_times")[0].findobj(Text)]
    assert texts.count("a rank idles") == 2


def test_every_policy_has_its_own_colour() -> None:
    assert set(POLICY_COLOURS) == set(POLICY_ORDER)
    colours = [np.array(to_rgb(c)) for c in POLICY_COLOURS.values()]
    for i, colour in enumerate(colours):
        assert all(np.linalg.norm(colour - other) > 0.2 for other in colours[:i])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(0.0), "0.00"),
        (number(1234567.0), "1,234,567"),
        (number(0.012345), "0.0123"),
        (number(9.999), "10.0"),
        (number(99.96), "100"),
        (number(float("nan")), "-"),
        (times(9.999), "10.0x"),
        (times(2.5), "2.50x"),
        (times(float("inf")), "inf"),
        (percent(0.0812), "8.1 %"),
        (time_unit(0.5).text(0.25), "250 ms"),
        (bytes_unit(80 * GIB).text(41.2 * GIB), "41.2 GiB"),
        (bytes_unit(5 * 2**20).text(2**20), "1.00 MiB"),
        (tokens_unit(4.8e7).text(4.8e7), "48.0 million tokens"),
        (" ".join(time_unit(20).column([20.0, 0.5, float("nan")])), "20.00 0.50 -"),
        (" ".join(time_unit(2000).column([2000.0, 150.0])), "2,000 150"),
    ],
)
def test_numbers_are_short(text: str, expected: str) -> None:
    assert text == expected
