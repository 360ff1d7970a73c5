"""`psrl calibrate`: measurements in, a cost model with its error and its domain out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from psrl.core.cost.calibration import Calibration, ErrorRow
from psrl.core.errors import ConfigError, ExitCode, ToleranceError
from psrl.core.files import IfExists, check_new_file

from .output import OutputOptions

Table = Literal["vtrain", "h200"]


@dataclass(frozen=True)
class Calibrate:
    """Fit the cost model to executed runs or to public measurements; print the held-out error."""

    out: Path
    """calibration file (JSON) to write"""
    output: OutputOptions
    measured: tuple[Path, ...] = ()
    """run directories of `psrl execute` or `psrl compare --execute`"""
    table: Table | None = None
    """public measurements instead: vtrain = Megatron iterations on A100, h200 = kernel tables"""
    data: Path = Path("examples/calibration")
    """folder of the public tables"""
    max_error: float | None = None
    """exit with code 4 if the mean held-out error of a headline group exceeds this, e.g. 0.1"""
    if_exists: IfExists = "error"

    def run(self) -> ExitCode:
        self._check()
        with self.output.step("fitting and holding out"):
            calibration = self._calibrate()
        calibration.save(self.out)
        result = {"calibration": str(self.out), **calibration.model_dump(mode="json")}
        self.output.emit(result, f"{describe_calibration(calibration)}\n\nwritten: {self.out}")
        if self.max_error is not None:
            require_error(calibration.errors, self.max_error)
        return ExitCode.OK

    def _check(self) -> None:
        if bool(self.measured) == bool(self.table):
            raise ConfigError(
                "calibrate needs either executed runs or a table of public measurements",
                "pass --measured RUN... or --table vtrain|h200",
            )
        if self.max_error is not None and self.max_error <= 0:
            raise ConfigError(f"--max-error {self.max_error} is not positive", "0.1 means 10 %")
        check_new_file(self.out, self.if_exists)

    def _calibrate(self) -> Calibration:
        if self.table == "vtrain":
            from psrl.analysis.calibration.vtrain import calibrate_vtrain

            return calibrate_vtrain(self.data / "vtrain_a100", self.data / "nccl_a100")
        if self.table == "h200":
            from psrl.analysis.calibration.h200_tables import calibrate_h200

            return calibrate_h200(self.data / "h200")
        from psrl.analysis.calibration.executed_fit import calibrate_executed

        return calibrate_executed(self.measured)


def require_error(rows: tuple[ErrorRow, ...], max_error: float) -> None:
    """Raise if a headline group's mean error exceeds the limit.

    Raises:
        ToleranceError: naming the worst group.
    """
    worst = max((row for row in rows if row.headline), key=lambda row: row.mean_percent)
    if not worst.mean_percent <= 100.0 * max_error:
        raise ToleranceError(
            f"mean error of '{worst.group}' is {worst.mean_percent:.1f} % over {worst.num_rows} "
            f"measurement(s), more than {100.0 * max_error:.1f} %",
            "measure more micro-batches of more different sizes on an idle machine",
        )


def describe_calibration(calibration: Calibration) -> str:
    """Coefficients, how each was found, and the error table."""
    from psrl.analysis.calibration.errors import format_errors

    values: dict[str, Any] = calibration.coefficients.model_dump()
    values |= {f"multi_host.{k}": v for k, v in calibration.multi_host.items()}
    lines = [f"{'coefficient':<48}{'value':>12}{'rows':>7}  status"]
    for name, found in calibration.identification.items():
        status = found.status.replace("_", " ")
        if found.relative_error is not None:
            status += f", standard error {found.relative_error:.0%}"
        if found.reason:
            status += f": {found.reason}"
        lines.append(f"{name:<48}{values[name]:>12.4g}{found.num_rows:>7}  {status}")
    domain = calibration.domain
    lines.append(f"\ndomain: {domain.device}, {domain.dtype_bytes}-byte values")
    for name, (low, high) in domain.ranges.items():
        lines.append(f"  {name:<30}{low:>12,.0f} to {high:,.0f}")
    return "\n".join(lines) + "\n\nheld out\n" + format_errors(calibration.errors)
