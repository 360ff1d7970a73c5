"""The half of `psrl compare` that holds a simulated run against an executed one."""

from pathlib import Path

from psrl.core.errors import ConfigError, ExitCode, ToleranceError
from psrl.core.files import IfExists
from psrl.core.run.run_directory import RunDir

from .output import OutputOptions


def compare_with_measured(
    measured: Path,
    simulated: Path,
    tolerance: float,
    run_dir: Path | None,
    if_exists: IfExists,
    output: OutputOptions,
) -> ExitCode:
    """Print the agreement of two runs of one plan, phase by phase.

    Args:
        run_dir: directory for agreement.csv, metrics.json and a picture of the K/V curves; None
            writes nothing.

    Raises:
        ToleranceError: if they disagree.
    """
    from psrl.analysis.figures.agreement_plots import write_kv_curves
    from psrl.analysis.simulated_vs_measured import (
        agreement,
        disagreements,
        format_agreement,
        kv_curves,
    )
    from psrl.analysis.tables import write_csv

    if not tolerance >= 0:
        raise ConfigError(f"--tolerance {tolerance} is negative", "0.1 means 10 %")
    table = agreement(measured, simulated)
    found = disagreements(table, tolerance)
    rows = table.to_dict("records")
    result = {"phases": rows, "tolerance": tolerance, "disagreements": found}
    text = format_agreement(table)
    if run_dir is not None:
        details = {"kind": "agreement", "measured": str(measured), "simulated": str(simulated)}
        inputs = [measured, simulated]
        with RunDir(run_dir, "compare", if_exists, details, inputs) as run:
            run.write_json("metrics.json", result)
            write_csv(table, run.path / "agreement.csv")
            write_kv_curves(kv_curves(measured, simulated), run.path / "plots")
        text += f"\n\nwritten: {run_dir}"
    output.emit(result, text)
    if found:
        raise ToleranceError(
            f"{len(found)} disagreement(s) beyond {tolerance:.1%}: " + "; ".join(found),
            "calibrate with `psrl calibrate --measured`, simulate with --calibration, and execute "
            "with --warmup and --repeat on an idle machine",
        )
    return ExitCode.OK
