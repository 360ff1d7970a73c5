"""Parse the command line, run the command, turn errors into messages and exit codes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from psrl import __version__
from psrl.core.errors import ExitCode, PsrlError

from .bench_command import Bench
from .calibrate_command import Calibrate
from .compare_command import Compare
from .doctor_command import Doctor
from .execute_commands import Execute, Verify
from .plan_commands import PlanCommand
from .reproduce_command import Reproduce
from .simulate_command import Simulate
from .sweep_command import Sweep
from .trace_commands import TraceImport
from .trace_tools import TraceMerge, TraceSlice, TraceStats, TraceSynth, TraceValidate

TraceSubcommand = (
    Annotated[TraceImport, tyro.conf.subcommand("import", prefix_name=False)]
    | Annotated[TraceStats, tyro.conf.subcommand("stats", prefix_name=False)]
    | Annotated[TraceValidate, tyro.conf.subcommand("validate", prefix_name=False)]
    | Annotated[TraceSlice, tyro.conf.subcommand("slice", prefix_name=False)]
    | Annotated[TraceMerge, tyro.conf.subcommand("merge", prefix_name=False)]
    | Annotated[TraceSynth, tyro.conf.subcommand("synth", prefix_name=False)]
)


@dataclass(frozen=True)
class TraceCommands:
    """Import, inspect, reduce, merge and synthesise training samples."""

    command: TraceSubcommand

    def run(self) -> ExitCode:
        return self.command.run()


Command = (
    Annotated[TraceCommands, tyro.conf.subcommand("trace", prefix_name=False)]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan", prefix_name=False)]
    | Annotated[Simulate, tyro.conf.subcommand("simulate", prefix_name=False)]
    | Annotated[Compare, tyro.conf.subcommand("compare", prefix_name=False)]
    | Annotated[Sweep, tyro.conf.subcommand("sweep", prefix_name=False)]
    | Annotated[Execute, tyro.conf.subcommand("execute", prefix_name=False)]
    | Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate", prefix_name=False)]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce", prefix_name=False)]
    | Annotated[Bench, tyro.conf.subcommand("bench", prefix_name=False)]
    | Annotated[Doctor, tyro.conf.subcommand("doctor", prefix_name=False)]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `psrl`; returns the exit code (psrl.core.errors.ExitCode)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"psrl {__version__}")
        return ExitCode.OK
    command = tyro.cli(
        Command,
        prog="psrl",
        description="Replay traces of RL training samples, plan how to share their prefixes, "
        "simulate and execute the plan.",
        args=arguments or ["--help"],
        config=(
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.FlagCreatePairsOff,
        ),
    )
    try:
        return command.run()
    except PsrlError as error:
        print(f"psrl: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("psrl: interrupted; nothing half-written was kept", file=sys.stderr)
        return 130
