"""Make the tables beside this file from the public measurements they are derived from.

    python examples/calibration/make_calibration_data.py DATA

DATA has the folders vtrain_a100 (single_node.csv, multi_node.csv), nccl_a100 (nccl_N.log) and
h200_kernels (*_perf.parquet), with the files as their sources publish them.
"""

import argparse
from pathlib import Path

import pandas as pd

from psrl.analysis.calibration.h200_tables import reduce_attention, reduce_collectives, reduce_gemm
from psrl.analysis.calibration.megatron_iterations import COLUMNS
from psrl.analysis.calibration.nccl import curves_to_table, parse_nccl_log

HERE = Path(__file__).resolve().parent


def write(table: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    table.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    print(f"{path.relative_to(HERE)}: {len(table)} rows, {path.stat().st_size:,} bytes")


def convert_iterations(source: Path) -> pd.DataFrame:
    """Columns renamed, milliseconds to seconds; the parameter count follows from the rest."""
    table = pd.read_csv(source).iloc[:, -len(COLUMNS) :].set_axis(list(COLUMNS), axis=1)
    return table.assign(iteration_s=table["iteration_s"] / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    for name in ("single_node.csv", "multi_node.csv"):
        write(convert_iterations(data / "vtrain_a100" / name), HERE / "vtrain_a100" / name)
    logs = {n: data / "nccl_a100" / f"nccl_{n}.log" for n in (2, 4, 8, 16, 32, 64, 128)}
    curves = {str(n): parse_nccl_log(log.read_text(encoding="utf-8")) for n, log in logs.items()}
    write(curves_to_table(curves), HERE / "nccl_a100" / "all_reduce.csv")
    kernels = data / "h200_kernels"
    for name, reduce, source in (
        ("gemm", reduce_gemm, "gemm_perf.parquet"),
        ("attention", reduce_attention, "context_attention_perf.parquet"),
        ("collectives", reduce_collectives, "nccl_perf.parquet"),
    ):
        write(reduce(pd.read_parquet(kernels / source)), HERE / "h200" / f"{name}.csv")


if __name__ == "__main__":
    main()
