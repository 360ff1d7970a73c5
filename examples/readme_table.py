"""The tables and pictures of README.md: prints them, and with --write puts them in their places."""

import re
import shutil
import sys
import tempfile
from pathlib import Path

import pandas as pd

import psrl
from psrl.analysis.report.ladder import display_ladder
from psrl.analysis.units import percent, times

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("verl", "vllm_ps", "sglang_ps", "dfs_cut", "quick", "psrl")
WORDS = {"verl": "`verl` (dense)", "merged_dense": "`merged_dense` (dense, steps merged)"}


def policies(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of README's first table."""
    dense = table["policy"].isin(list(WORDS))
    return pd.DataFrame(
        {
            "policy": [WORDS.get(name, f"`{name}`") for name in table["policy"]],
            "time (s)": [f"{v:.2f}" for v in table["makespan_s"]],
            "over dense steps": [times(v) for v in table["speedup"]],
            "over merged": [times(v) for v in table["merged_speedup"]],
            "bound": [times(v) for v in table["speedup_bound"]],
            "bubbles": [percent(v) for v in table["bubble_fraction"]],
            "executed tokens": [f"{v:,}" for v in table["executed_tokens"]],
            "peak memory (GiB)": [f"{v / 2**30:.1f}" for v in table["peak_memory_bytes"]],
            "gap to proven bound": [
                "" if is_dense else percent(gap)
                for is_dense, gap in zip(dense, table["gap"], strict=True)
            ],
        }
    )


def markdown(table: pd.DataFrame, bold: str) -> str:
    """A table with the row of one policy in bold."""
    rows = [list(table.columns), ["---"] * len(table.columns)]
    for row in table.itertuples(index=False, name=None):
        strong = row[0] == bold
        rows.append([f"**{cell}**" if strong and cell else str(cell) for cell in row])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    trace = psrl.load_trace(ROOT / "examples/traces/tau_bench_airline")
    setup = psrl.load_setup(ROOT / "examples/clusters/8xh100.toml")
    compared = psrl.compare(trace, setup, POLICIES)
    tables = {
        "policies": markdown(policies(compared.table()), "`psrl`"),
        "ladder": markdown(display_ladder(compared.ladder()), "placed and cut"),
    }
    print("\n\n".join(tables.values()))
    if "--write" not in sys.argv:
        return
    readme = ROOT / "README.md"
    text = readme.read_text("utf-8")
    for name, table in tables.items():
        marked = rf"(<!-- {name}: make readme -->\n).*?(<!-- end -->)"
        text, found = re.subn(marked, lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.S)
        assert found == 1, f"README.md has {found} places for the table {name}"
    readme.write_text(text, "utf-8")
    with tempfile.TemporaryDirectory() as folder:
        compared.save(Path(folder) / "run")
        for name in ("gain", "ladder"):
            shutil.copy(Path(folder) / "run" / "plots" / f"{name}.png", ROOT / "docs" / "images")


if __name__ == "__main__":
    main()
