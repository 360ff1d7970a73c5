"""Match rates that others published or measured, on the whole recordings they are about."""

from pathlib import Path

import pytest

from psrl.core.samples.trace import open_trace
from psrl.traces.modes import derive
from psrl.traces.stats import sharing_stats
from tests.traces.figures.make_figures import FIGURES

FIGURES_DIR = Path(__file__).parent / "figures"


@pytest.mark.parametrize(
    ("name", "level", "percent", "tolerance"),
    [
        # All tokens, outputs (never shared) included.
        ("mooncake_conversation", "overall", 36.3, 0.05),
        ("mooncake_synthetic", "overall", 64.5, 0.05),
        # Step mode; the tokenizer moves agents' rates by some hundredths.
        ("alfworld", "within_group", 92.1, 0.1),
        ("webshop", "within_group", 83.1, 0.1),
        # The run cut long prompts, which the importer ignores: 0.1 points.
        ("webshop", "overall", 91.8, 0.2),
    ],
)
def test_match_rates(name: str, level: str, percent: float, tolerance: float) -> None:
    trace = open_trace(FIGURES_DIR / name)
    (batch,) = trace
    if trace.header.sampling_mode == "traj":
        batch = derive(batch, "step", "traj")
    rate = sharing_stats(batch)[level]["prefix_match_rate"]
    assert 100 * rate == pytest.approx(percent, abs=tolerance)


def test_every_trace_is_checked_and_names_its_source() -> None:
    found = {path.parent.name for path in FIGURES_DIR.glob("*/trace.json")}
    assert found == {figure.name for figure in FIGURES}
    for figure in FIGURES:
        header = open_trace(FIGURES_DIR / figure.name).header
        assert (header.source, header.licence) == (figure.source, figure.licence)
