"""`psrl reproduce`: every published number beside ours, under one set of assumptions."""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from psrl.core.errors import ConfigError, ExitCode
from psrl.core.files import IfExists
from psrl.core.run.run_directory import RunDir, read_json

from .output import OutputOptions

PUBLISHED_FILE = "published.csv"
MEASUREMENTS_FILE = "measurements.json"


@dataclass(frozen=True)
class Reproduce:
    """Simulate the paper's experiments and put every published number beside ours."""

    output: OutputOptions
    run_dir: Path = Path("runs/reproduce")
    """run directory to write: table.md, table.csv, table.json, images"""
    scenario: tuple[str, ...] = ()
    """only these scenarios (file names without .toml); rows of the others say so"""
    scenarios: Path = Path("examples/paper")
    """folder with the scenarios, their assumptions and the published numbers"""
    workers: int = 2
    """processes that plan and simulate"""
    from_run: Path | None = None
    """make the tables again from the measurements of an earlier run, without simulating"""
    if_exists: IfExists = "error"

    def run(self) -> ExitCode:
        from psrl.paper.figure import write_ratio_figure
        from psrl.paper.measure import tasks_of
        from psrl.paper.results import Results
        from psrl.paper.rows import reproduced_rows
        from psrl.paper.scenarios import load_assumptions, load_scenarios
        from psrl.paper.sections import sections
        from psrl.paper.table import read_published, rows_frame, write_tables

        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}", "take at least one process")
        assumptions = load_assumptions(self.scenarios)
        published = read_published(self.scenarios / PUBLISHED_FILE)
        chosen = load_scenarios(self.scenarios, self.scenario)
        with RunDir(self.run_dir, "reproduce", self.if_exists, {"kind": "reproduction"}) as run:
            tasks = list(tasks_of(chosen))
            if self.from_run is None:
                measured = self._measure_all(tasks, assumptions)
            else:
                measured = read_measurements(self.from_run, [task.name for task in tasks])
            run.note(plan_time_s={name: m.pop("plan_time_s", None) for name, m in measured.items()})
            run.write_json(MEASUREMENTS_FILE, measured)
            results = Results(list(measured.values()), assumptions)
            rows = reproduced_rows(published, results)
            titles = {scenario.name: scenario.content.title for scenario in chosen}
            text = sections(results, titles)
            write_ratio_figure(rows, run.path / "images")
            summary = write_tables(rows, text, assumptions.statements, run.path)
        table = rows_frame(rows).to_dict("records")
        self.output.emit(
            {"run": str(self.run_dir), "rows": table, "summary": summary},
            f"{summary['text']}\n\ntable: {self.run_dir / 'table.md'}",
        )
        return ExitCode.OK

    def _measure_all(self, tasks: Sequence[Any], assumptions: Any) -> dict[str, dict[str, Any]]:
        """Measurements by task name, in the order of the tasks."""
        from psrl.paper.measure import measure_named

        began_s = time.perf_counter()
        done: dict[str, dict[str, Any]] = {}

        def finish(name: str, result: dict[str, Any]) -> None:
            done[name] = result
            if not (self.output.quiet or self.output.json):
                elapsed_s = time.perf_counter() - began_s
                line = f"[{len(done)}/{len(tasks)}] {name}, {elapsed_s:.0f} s"
                print(line, file=sys.stderr, flush=True)

        if not (self.output.quiet or self.output.json):
            print(f"planning and simulating {len(tasks)} runs", file=sys.stderr, flush=True)
        longest_first = sorted(tasks, key=lambda task: -task.effort)
        measure_task = partial(measure_named, assumptions=assumptions)
        if self.workers == 1:
            for task in longest_first:
                finish(*measure_task(task))
        else:
            # Leaving the block, by an error or Ctrl-C too, ends the processes.
            with get_context("spawn").Pool(self.workers, _ignore_interrupts) as pool:
                for name, result in pool.imap_unordered(measure_task, longest_first):
                    finish(name, result)
        return {task.name: done[task.name] for task in tasks}


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; the parent ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_measurements(run: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measurements of an earlier run, by task name.

    Raises:
        ConfigError: if the run has none, or lacks one of the tasks.
    """
    found: dict[str, dict[str, Any]] = read_json(run / MEASUREMENTS_FILE)
    for name in names:
        if name not in found:
            raise ConfigError(
                f"{run / MEASUREMENTS_FILE} has no '{name}'",
                "run again without --from-run, or choose its scenarios with --scenario",
            )
    return {name: found[name] for name in names}
