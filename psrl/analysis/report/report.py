"""Self-contained HTML report of a comparison: questions, each with a picture and a sentence."""

import base64
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from psrl import __version__
from psrl.analysis.figures import plots, run_plots, series
from psrl.analysis.figures.style import save_figure
from psrl.analysis.tables import display_executed, display_table, measured_table, policy_table
from psrl.analysis.units import percent
from psrl.core.files import write_file

from .comparison import Comparison, load_comparison
from .ladder import display_ladder, ladder
from .sentences import (
    NOT_MODELLED,
    assumptions,
    balance_sentence,
    certainty_sentence,
    exactness_sentence,
    failed_checks,
    gain_sentence,
    ladder_sentence,
    memory_sentence,
    merging_sentence,
    recommended_policy,
    run_sentence,
    why_sentence,
    workload_sentence,
)

_TEMPLATE = "report.html.jinja"
_LADDER_CAPTION = (
    "Each rung trains the same tokens in the same contexts. Shared is the dense rung above it with "
    "less to compute; placed and cut is the run itself. FLOP ratio: the first rung's FLOPs over "
    "those of the rung. Bound: the first rung's time over that of the rung's arithmetic on devices "
    "that are never idle."
)


@dataclass(frozen=True)
class Picture:
    """A PNG as a data URI."""

    data: str
    caption: str


@dataclass(frozen=True)
class Command:
    """A shell command and what it is for."""

    label: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check, set off from the text."""

    text: str
    passed: bool


@dataclass(frozen=True)
class Section:
    """One question of the report, its answer, and what shows it."""

    question: str
    answer: str
    figures: list[Picture] = field(default_factory=list)
    tables: list[pd.DataFrame] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    verdict: Verdict | None = None


def write_report(run: Path, baseline: str = "verl", final_path: Path | None = None) -> Path:
    """Write report.html and plots/* (PNG, SVG, CSV) into a comparison run directory.

    Args:
        run: directory to read and write.
        baseline: policy that speed-ups refer to.
        final_path: name of the run directory in the commands shown, if `run` is still to be
            renamed.

    Returns:
        Path of the report; equal run directories give equal bytes.

    Raises:
        ConfigError: naming the file or key that is missing.
    """
    comparison = load_comparison(run, baseline)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    table = policy_table(comparison).assign(plan_time_s=math.nan)
    text = environment.get_template(_TEMPLATE).render(
        title=_title(comparison),
        workload=workload_sentence(comparison),
        policies=display_table(table),
        focus=comparison.focus,
        phases=", ".join(comparison.phases),
        sections=_sections(comparison, final_path or run),
        assumptions=assumptions(comparison),
        not_modelled=NOT_MODELLED,
        sharing=_sharing(comparison),
        sampling_mode=comparison.trace["sampling_mode"],
        version=__version__,
        trace_path=comparison.trace["path"],
        trace_hash=comparison.trace["content_hash"],
    )
    path = run / "report.html"
    write_file(path, text)
    return path


def write_figures(comparison: Comparison) -> dict[str, Path]:
    """Draw every figure of a comparison into plots/; returns the PNGs by name."""
    phase, baseline = comparison.main_phase, comparison.baseline
    gain, factors = series.gain_series(comparison), series.factors_series(comparison)
    memory, workers = series.memory_series(comparison), series.worker_series(comparison)
    timeline, tokens = series.timeline_series(comparison), series.token_series(comparison)
    predicted = series.predicted_series(comparison)
    stack, rates = run_plots.iteration_series(comparison), run_plots.throughput_series(comparison)
    ops = run_plots.micro_batch_series(comparison)
    limit = comparison.setup.cluster.device.memory_bytes
    drawn: dict[str, tuple[Figure, pd.DataFrame]] = {
        "gain": (plots.gain(gain, baseline), gain),
        "memory_over_time": (plots.memory_over_time(memory, phase, limit), memory),
        "worker_times": (plots.worker_times(workers, phase), workers),
        "timeline": (plots.timeline(timeline, phase), timeline),
        "tokens": (plots.tokens(tokens), tokens),
        "iteration_stack": (run_plots.iteration_stack(stack), stack),
        "throughput": (run_plots.throughput(rates), rates),
        "micro_batch_times": (run_plots.micro_batch_times(ops, phase), ops),
    }
    rungs = ladder(comparison)
    if not rungs.empty:
        drawn["ladder"] = (plots.rungs(rungs), rungs)
    if not factors.empty:
        drawn["factors"] = (plots.factors(factors, baseline), factors)
    if not predicted.empty:
        drawn["predicted_vs_measured"] = (plots.predicted_vs_measured(predicted), predicted)
    directory = comparison.path / "plots"
    return {name: save_figure(fig, data, directory, name) for name, (fig, data) in drawn.items()}


def _sections(comparison: Comparison, shown_path: Path) -> list[Section]:
    pictures = write_figures(comparison)
    predicted = series.predicted_series(comparison)
    factors, rungs = series.factors_series(comparison), ladder(comparison)
    phase, best = comparison.main_phase, recommended_policy(comparison)

    def show(**captions: str) -> list[Picture]:
        return [_picture(pictures[n], text) for n, text in captions.items() if n in pictures]

    return [
        Section(
            "What do I gain?",
            gain_sentence(comparison),
            show(
                gain="Speed-up of each policy over the baseline. No plan can pass a bound: all "
                "devices would do the arithmetic of the row at the model's rates, all the time.",
                iteration_stack="Where the time of one iteration goes.",
            ),
        ),
        *_ladder(comparison, rungs, show(ladder=_LADDER_CAPTION)),
        Section(
            "Why?",
            why_sentence(comparison, factors),
            show(
                factors="Sharing: less to compute (merged_dense: by merging). Placement: the "
                "slowest rank is nearer to the mean. Cuts: fewer bubbles and waits. Each bar "
                "starts where the one above it ends, and the diamond is their product.",
                tokens="Tokens computed over all ranks; a prefix that two ranks need counts twice.",
            ),
        ),
        Section(
            "Will it fit?",
            memory_sentence(comparison),
            show(
                memory_over_time=f"The device with the highest peak of the {phase} phase, per "
                "policy; right, the device with the most cached keys, values and gradients."
            ),
        ),
        Section(
            "Who waits?",
            balance_sentence(comparison),
            show(
                worker_times="Work of a rank: from its first to its last op, per optimizer step.",
                timeline=f"Ops of the {phase} phase, the baseline on top, on one time axis; at "
                f"most {series.MAX_TIMELINE_ROWS} lines, the slowest and fastest rank included.",
                micro_batch_times="Equal heights mean equal micro-batches; a high one holds up its "
                "pipeline.",
            ),
        ),
        Section(
            "How sure are you?",
            certainty_sentence(comparison, predicted),
            show(
                predicted_vs_measured="Simulated and executed time of each phase; error = "
                "simulated / executed - 1."
            ),
            tables=_evidence(comparison),
            warnings=comparison.warnings,
            verdict=_verdict(comparison),
        ),
        Section(
            "How do I run it?",
            run_sentence(comparison, best),
            commands=_commands(comparison, best, shown_path),
        ),
    ]


def _title(comparison: Comparison) -> str:
    cluster, count = comparison.setup.cluster, len(comparison.policies)
    what = "scheduling policy" if count == 1 else "scheduling policies"
    where = f"{cluster.num_devices:,} x {cluster.device.name}"
    return f"{count} {what}: {comparison.setup.model.name} on {where}"


def _ladder(comparison: Comparison, rungs: pd.DataFrame, figures: list[Picture]) -> list[Section]:
    """How much of the gain is left over what users do without psRL."""
    merging = [] if comparison.merging is None else [merging_sentence(comparison)]
    if rungs.empty and not merging:
        return []
    climbed = [] if rungs.empty else [ladder_sentence(rungs)]
    return [
        Section(
            "Against what?",
            " ".join([*climbed, *merging]),
            figures,
            tables=[] if rungs.empty else [display_ladder(rungs)],
        )
    ]


def _evidence(comparison: Comparison) -> list[pd.DataFrame]:
    """Tables of the executed runs and of the exactness checks, for those that exist."""
    tables = []
    if comparison.executed:
        tables.append(display_executed(measured_table(comparison)))
    if comparison.exactness:
        tables.append(
            pd.DataFrame(
                {
                    "quantity": [c["quantity"] for c in comparison.exactness],
                    "largest relative difference": [
                        f"{c['largest_relative_difference']:.1e}" for c in comparison.exactness
                    ],
                    "tolerance": [
                        "-" if math.isinf(c["tolerance"]) else f"{c['tolerance']:.0e}"
                        for c in comparison.exactness
                    ],
                }
            )
        )
    return tables


def _verdict(comparison: Comparison) -> Verdict | None:
    if not comparison.exactness:
        return None
    return Verdict(exactness_sentence(comparison), not failed_checks(comparison))


def _sharing(comparison: Comparison) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "sampling mode": list(comparison.sharing),
            "samples": [f"{s['num_samples']:,}" for s in comparison.sharing.values()],
            "logical tokens": [f"{s['logical_tokens']:,}" for s in comparison.sharing.values()],
            "unique tokens": [f"{s['unique_tokens']:,}" for s in comparison.sharing.values()],
            "prefix match rate": [
                percent(s["prefix_match_rate"]) for s in comparison.sharing.values()
            ],
        }
    )


def _commands(comparison: Comparison, policy: str, shown_path: Path) -> list[Command]:
    """`psrl execute` for the chosen plan and the baseline, under torchrun, and the check."""

    def executed(name: str) -> str:
        return shlex.quote(str(shown_path.with_name(f"{shown_path.name}-{name}")))

    def execute(name: str) -> str:
        plan = shlex.quote(str(shown_path / comparison.plan_directory(name)))
        trace = shlex.quote(comparison.trace["path"])
        return f"psrl execute {plan} --trace {trace} --run-dir {executed(name)}"

    cluster, baseline = comparison.setup.cluster, comparison.baseline
    torchrun = f"torchrun --nproc-per-node {cluster.devices_per_host} "
    if cluster.num_hosts > 1:
        torchrun += (
            f"--nnodes {cluster.num_hosts} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 "
        )
    torchrun += "--no-python "
    several = cluster.num_hosts > 1
    start, where = (torchrun, ", on every host") if several else ("", "")
    commands = [
        Command(f"The plan of {policy}, all processes on this machine:", execute(policy)),
        Command(f"The same under torchrun{where}:", torchrun + execute(policy)),
    ]
    if policy != baseline:
        commands += [
            Command(f"The baseline {baseline}{where}:", start + execute(baseline)),
            Command(
                "Are logprobs, loss and gradients the same?",
                f"psrl verify {executed(policy)} {executed(baseline)}",
            ),
        ]
    return commands


def _picture(png: Path, caption: str) -> Picture:
    encoded = base64.b64encode(png.read_bytes()).decode("ascii")
    return Picture(f"data:image/png;base64,{encoded}", caption)
