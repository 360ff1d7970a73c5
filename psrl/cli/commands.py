"""Parse the command line, run the command, turn errors into messages and exit codes."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from psrl import __version__
from psrl.core.errors import ExitCode, PsrlError

from .bench_command import Bench
from .calibrate_command import Calibrate
from .compare_command import Compare
from .doctor_command import Doctor
from .error_messages import prepare_process, report
from .execute_commands import Execute, Verify
from .output import results_only_on_stdout, writing_stdout
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


def run(arguments: list[str]) -> int:
    """Parse and run a command; errors that are not psRL's own faults become messages."""
    prepare_process()
    try:
        command = _parse(arguments or ["--help"])
        with results_only_on_stdout():
            return _finish(command)
    except BaseException as error:
        return report(error)


def _finish(command: Command) -> int:
    try:
        return command.run()
    except SystemExit as error:
        raise PsrlError(
            f"the command was ended by a call of exit({error.code!r}) in code that it uses",
            "a policy or another extension must raise an error instead",
        ) from error


def _parse(arguments: list[str]) -> Command:
    """The command; prints help and refusals, and then leaves by SystemExit."""
    with writing_stdout():
        if arguments == ["--version"]:
            print(f"psrl {__version__}")
            raise SystemExit(ExitCode.OK)
        return _parsed(arguments)


def _parsed(arguments: list[str]) -> Command:
    parsed: Command = tyro.cli(
        Command,
        prog="psrl",
        description="Replay traces of RL training samples, plan how to share their prefixes, "
        "simulate and execute the plan.",
        args=arguments,
        config=(
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.FlagCreatePairsOff,
        ),
    )
    return parsed
