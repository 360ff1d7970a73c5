"""Stage `equality` of the GPU check: shared execution beside dense, and dense beside itself."""

from itertools import product
from typing import get_args

from psrl.core.cost.presets import DEVICES
from psrl.core.plan.plan import Program

from .backend import Bench, Recompute, dense_program, problems, shared_program
from .gpu_run import TOLERANCE, Result, Run, dtype_name, new_bench, result, sliced, use_own_policy

EQUALITY_SHARE = 0.5
"""Share of the time budget after which no equality row starts."""


def equality(run: Run) -> None:
    """Errors of every model, dtype, recompute mode and cut."""
    batch = sliced(run.scale.equality_slice)
    for dtype, model in product(TOLERANCE, run.scale.models):
        what = f"equality, {model.name}, {dtype_name(dtype)}"
        with run.row(what, reserved_s(run)) as enough:
            if enough:
                equality_rows(run, new_bench(run, batch, model, dtype), what)


def reserved_s(run: Run) -> float:
    """Time that equality leaves to speed."""
    return (1 - EQUALITY_SHARE) * run.report.budget_s


def equality_rows(run: Run, bench: Bench, what: str) -> None:
    """Rows of one model and dtype."""
    forward, target = problems(bench.batch, bench.model, DEVICES["h200-141"])
    first, second = run.scale.dense_cuts
    use_own_policy(bench, bench.prepare(dense_program(forward, first)))
    dense = update(bench, dense_program(target, first))
    floor = update(bench, dense_program(target, second)).errors(dense)
    modes: tuple[Recompute, ...] = get_args(Recompute)
    for recompute, count in product(modes, run.scale.cuts):
        with run.row(f"{what}, recompute {recompute}, cut {count}", reserved_s(run)) as enough:
            if not enough:
                continue
            program = shared_program(target, count, recompute=recompute)
            errors = update(bench, program).errors(dense)
            passed = errors["gradient"] <= TOLERANCE[bench.dtype]
            run.report.passed &= passed
            row = {"model": bench.model.name, "dtype": dtype_name(bench.dtype)}
            run.report.equality.append(
                row
                | {"recompute": recompute, "num_micro_batches": len(program.micro_batches)}
                | {"shared_vs_dense": errors, "dense_vs_dense": floor}
                | {"bar": TOLERANCE[bench.dtype], "passed": passed}
            )


def update(bench: Bench, program: Program) -> Result:
    """Run an update once."""
    bench.run(bench.prepare(program))
    return result(bench)
