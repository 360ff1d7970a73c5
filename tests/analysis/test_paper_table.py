"""Rows, verdicts and tables of a reproduction."""

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import ConfigError
from psrl.paper.figure import write_ratio_figure
from psrl.paper.table import (
    VERDICTS,
    Published,
    Row,
    read_published,
    rows_frame,
    tally,
    write_tables,
)

HEADER = "id,workload,mode,gpus,system,metric,value,unit,kind,source\n"


def row(name: str, value: float, ours: float | None, kind: str = "ratio", note: str = "") -> Row:
    published = Published(name, f"what {name} is", value, "x", "S")
    return Row(published, kind, ours, None, note, "" if ours is not None else "not run")


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (10.0, "within 10 %"),
        (11.0, "within 10 %"),
        (11.1, "within 25 %"),
        (10 / 1.1, "within 10 %"),
        (9.0, "within 25 %"),
        (8.0, "within 25 %"),
        (7.9, "off"),
        (12.6, "off"),
        (None, "not simulated"),
        (float("nan"), "not simulated"),
        (0.0, "off"),
        (float("inf"), "off"),
    ],
)
def test_a_factor_counts_alike_above_and_below(ours: float | None, verdict: str) -> None:
    assert row("a", 10.0, ours).verdict == verdict


def test_published_numbers_are_read_with_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    line = "up,dtn,step,1536,psrl,update_s,88.7,s,reported,S\n"
    path.write_text(HEADER + line + "all,all,all,,verl,share,0.4,ratio,reported,S\n")
    first, second = read_published(path)
    assert first == Published("up", "dtn step 1,536 GPUs psrl: update s", 88.7, "s", "S")
    assert second.what == "verl: share"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "a,b,c,,d,e,many,s,reported,S\n", "value 'many' is no number"),
        ("id,value\na,1\n", "columns must be"),
        (HEADER + "a,b,c,,d,e,1,s,k,S\n" * 2, "the same id"),
    ],
)
def test_damaged_numbers_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "published.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_published(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_published(tmp_path / "none.csv")


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_the_tally_counts_every_row_once(ratios: list[float]) -> None:
    rows = [row(str(i), 1.0, ratio) for i, ratio in enumerate(ratios)]
    counts = tally(rows)
    assert sum(counts["ratio"].values()) == len(rows)
    assert set(counts["ratio"]) == set(VERDICTS)
    assert not any(counts["absolute"].values())


def test_tables_show_every_row_and_explain_the_wrong_ones(tmp_path: Path) -> None:
    rows = [
        row("good", 2.0, 2.1, note="not shown: it agrees"),
        row("bad", 2.0, 6.0, note="because of the moon"),
        row("worse", 1.0, 9.0, note="because of the moon"),
        row("none", 2.0, None, "absolute", note="nobody measured it"),
        row("made", 0.5, 0.5, "input"),
    ]
    rows.append(
        Row(
            rows[0].published, "ratio", 2.0, {"cuts": 1.5, "placement": 0.5, "sharing": 2.0}, "", ""
        )
    )
    summary = write_tables(rows, "## More\n\ntext", ["one thing"], tmp_path)
    text = (tmp_path / "table.md").read_text()
    for name in ("good", "bad", "none", "made"):
        assert f"| `{name}` |" in text
    both = "- `bad` (2.00 published, 6.00 ours), `worse` (1.00 published, 9.00 ours). because of"
    assert both in text
    assert "nobody measured it" not in text
    assert "| not run |" in text
    assert "it agrees" not in text
    assert "1.50 x 0.50 x 2.00" in text
    assert "1. one thing" in text
    assert text.endswith("text\n")
    assert "4 ratios (the target): 2 within 10 %, 2 off" in summary["text"]
    frame = pd.read_csv(tmp_path / "table.csv")
    assert frame["ratio"].tolist()[:2] == [1.05, 3.0]
    assert len(json.loads((tmp_path / "table.json").read_text())["rows"]) == 6


def test_the_figure_has_its_numbers_beside_it(tmp_path: Path) -> None:
    rows = [row("a", 2.0, 2.0), row("b", 2.0, 9.0, "absolute"), row("c", 1.0, None)]
    rows += [row("d", 1.0, float("inf")), row("e", 1.0, 0.0)]
    png = write_ratio_figure(rows, tmp_path)
    assert png.stat().st_size > 10_000
    assert (tmp_path / "paper_ratios.svg").is_file()
    frame = pd.read_csv(tmp_path / "paper_ratios.csv")
    assert frame["id"].tolist() == ["a", "b"]
    assert frame["ratio"].tolist() == [1.0, 4.5]


def test_a_quotient_of_rows_is_their_ratio() -> None:
    above, below = (row(name, value, None).published for name, value in (("t", 6.0), ("b", 4.0)))
    assert Published.quotient("q", "what", above, below).value == 1.5
    assert rows_frame([row("a", 1.0, 1.0)])["verdict"].tolist() == ["within 10 %"]
