"""Flags of `psrl execute`: every option can be set, and flags that do not go together are named."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro

from psrl.backend.model.moe import RouterOptions
from psrl.backend.train.loss import LossOptions
from psrl.backend.train.optimizer import OptimizerOptions
from psrl.backend.train.options import ExecuteOptions
from psrl.cli import main
from psrl.cli.execution_flags import ExecutionFlags
from psrl.core.errors import ExitCode, PsrlError
from psrl.core.samples.trace import Trace
from tests.backend.cases import TINY
from tests.backend.test_execute import make_plan, make_trace
from tests.backend.test_moe import MOE


def parse(line: str) -> ExecutionFlags:
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(ExecutionFlags, args=line.split(), config=config)


def test_without_flags_the_options_have_their_defaults() -> None:
    options = parse("").options(TINY)
    assert options == ExecuteOptions(loss=LossOptions(kl_coefficient=0.001))
    assert parse("").arguments() == []


EVERYTHING = (
    "--seed 3 --init-std 0.5 --reference-perturb 0.25 --loss ppo_clip "
    "--reduction seq-mean-token-sum-norm --fixed-length-tokens 64 --clip-ratio 0.1 "
    "--clip-ratio-high 0.3 --dual-clip 3.0 --kl-coefficient 0.5 --kl-estimator k2 "
    "--entropy-coefficient 0.01 --temperature 0.6 --token-advantages /a.parquet "
    "--learning-rate 0.01 --beta1 0.8 --beta2 0.9 --epsilon 1e-06 --weight-decay 0.1 "
    "--max-gradient-norm inf --router-balance-coefficient 0.7 --router-z-coefficient 0.05 "
    "--router-dispatcher allgather --dtype float64 --attention sdpa --reduce-token-ids "
    "--warmup 1 --repeat 2 --timeout-s 60.0"
)


def test_every_option_can_be_set() -> None:
    flags = parse(EVERYTHING)
    options = flags.options(MOE, keep_gradients=True, checkpoint=Path("/c"), resume=True)
    default = ExecuteOptions(
        loss=LossOptions(kl_coefficient=0.001), router=RouterOptions(), optimizer=OptimizerOptions()
    )
    unset = {"weights", "reference_weights", "measure_activations"}
    for found, before in (
        (options, default),
        (options.loss, default.loss),
        (options.router, default.router),
        (options.optimizer, default.optimizer),
    ):
        for field in fields(found):
            if field.name not in {*unset, "kind"}:
                assert getattr(found, field.name) != getattr(before, field.name), field.name
    assert " ".join(flags.arguments()) == EVERYTHING.replace("--loss ppo_clip ", "")


@pytest.mark.parametrize(
    ("line", "kind", "reduction", "kl_coefficient"),
    [
        ("--loss gspo", "gspo", "seq-mean-token-mean", 0.001),
        ("--loss cispo --kl-coefficient 0", "cispo", "token-mean", 0.0),
        ("--loss sft", "sft", "token-mean", 0.0),
        ("--loss sft --kl-coefficient 0.1 --kl-estimator k1", "sft", "token-mean", 0.1),
    ],
)
def test_losses(line: str, kind: str, reduction: str, kl_coefficient: float) -> None:
    loss = parse(line).options(TINY).loss
    assert (loss.kind, loss.reduction, loss.kl_coefficient) == (kind, reduction, kl_coefficient)


def test_weights_are_passed_on() -> None:
    options = parse("--weights /w --reference-weights /r").options(TINY)
    assert (options.weights, options.reference_weights) == (Path("/w"), Path("/r"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--loss gspo --reduction token-mean", "--reduction token-mean with --loss gspo"),
        ("--loss sft --clip-ratio 0.1", "--clip-ratio would have no effect with --loss sft"),
        (
            "--loss sft --clip-ratio-high 1 --dual-clip 3",
            "--clip-ratio-high and --dual-clip would have no effect with --loss sft",
        ),
        (
            "--loss sft --token-advantages /x",
            "--token-advantages would have no effect with --loss sft",
        ),
        (
            "--loss sft --kl-estimator k1",
            "--kl-estimator would have no effect with a --kl-coefficient",
        ),
        ("--loss cispo --dual-clip 3", "--dual-clip would have no effect with --loss cispo"),
        ("--reduction seq-mean-token-sum-norm", "pass --fixed-length-tokens"),
        (
            "--fixed-length-tokens 8",
            "--fixed-length-tokens would have no effect with any --reduction but",
        ),
        ("--weights /w --seed 1", "--seed would have no effect with --weights"),
        ("--weights /w --init-std 1", "--init-std would have no effect with --weights"),
        (
            "--reference-weights /w --reference-perturb 1",
            "--reference-perturb would have no effect with --reference-weights",
        ),
        (
            "--router-z-coefficient 1 --router-dispatcher allgather",
            "--router-z-coefficient and --router-dispatcher would have no effect with tiny",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_named(line: str, message: str) -> None:
    with pytest.raises(PsrlError) as caught:
        parse(line).options(TINY)
    assert message in str(caught.value)
    assert caught.value.exit_code == ExitCode.BAD_INPUT


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    trace = make_trace(tmp_path_factory.mktemp("flags") / "trace")
    make_plan(trace).save(trace.path.with_name("plan"))
    return trace


def command(trace: Trace, run_dir: Path, *flags: object) -> list[str]:
    plan = trace.path.with_name("plan")
    line = ("execute", plan, "--trace", trace.path, "--run-dir", run_dir, "--quiet", *flags)
    return [str(word) for word in line]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--clip-ratio -0.1", "--clip-ratio -0.1"),
        ("--clip-ratio-high 0", "--clip-ratio-high 0.0"),
        ("--dual-clip 0", "--dual-clip 0.0"),
        ("--temperature nan", "--temperature nan"),
        ("--kl-coefficient -1", "--kl-coefficient -1.0"),
        ("--learning-rate inf", "--learning-rate inf"),
        ("--beta2 1", "--beta2 1.0"),
        ("--epsilon 0", "--epsilon 0.0"),
        ("--weight-decay -1", "--weight-decay -1.0"),
        ("--max-gradient-norm 0", "--max-gradient-norm 0.0"),
        ("--init-std -1", "--init-std -1.0"),
        ("--repeat 0", "--repeat 0"),
        ("--warmup -1", "--warmup -1"),
        ("--resume", "add --checkpoint DIR"),
        ("--token-advantages none.parquet", "none.parquet cannot be read"),
        ("--weights none", "none is no directory of weights"),
    ],
)
def test_values_out_of_range(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main(command(trace, tmp_path / "run", *flags.split())) != ExitCode.OK
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def advantages(trace: Trace) -> pa.Table:
    """The trace's own advantages, token by token."""
    batch = trace.iteration(0)
    spans = [batch.sample_loss_spans(s) for s in range(batch.num_samples)]
    pairs = [(s, t) for s, found in enumerate(spans) for a, z in found for t in range(a, z)]
    sample, token = np.array(pairs).T
    return pa.table({"sample": sample, "token": token, "advantage": batch.advantage[sample]})


def gradient_norm(run: Path) -> float:
    norms: list[float] = json.loads((run / "metrics.json").read_text())["gradient_norm"]
    return norms[0]


@pytest.mark.slow
def test_token_advantages_replace_those_of_samples(trace: Trace, tmp_path: Path) -> None:
    """Twice the advantage in a file of another order gives twice the gradient."""
    table = advantages(trace)
    doubled = pa.array(2 * table["advantage"].to_numpy())
    path = tmp_path / "advantages.parquet"
    pq.write_table(
        table.set_column(2, "advantage", doubled).take(list(range(len(table)))[::-1]), path
    )
    common = ("--init-std", 0.2, "--kl-coefficient", 0, "--max-gradient-norm", "inf")
    assert main(command(trace, tmp_path / "one", *common)) == ExitCode.OK
    assert main(command(trace, tmp_path / "two", *common, "--token-advantages", path)) == 0
    norm = gradient_norm(tmp_path / "one")
    assert gradient_norm(tmp_path / "two") == pytest.approx(2 * norm, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["advantage"]), "columns sample, token, advantage"),
        (lambda t: t.slice(1), "rows of other tokens than the"),
        (
            lambda t: t.set_column(1, "token", pa.array([0, *t["token"].to_pylist()[1:]])),
            "the first is token",
        ),
        (
            lambda t: t.set_column(2, "advantage", pa.array([np.nan] * len(t))),
            "has advantage nan",
        ),
        (
            lambda t: t.set_column(2, "advantage", pa.array(["much"] * len(t))),
            "cannot be read as token advantages",
        ),
    ],
    ids=["column", "rows", "token", "nan", "text"],
)
def test_wrong_token_advantages(
    trace: Trace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pa.Table], pa.Table],
    message: str,
) -> None:
    path = tmp_path / "wrong.parquet"
    pq.write_table(change(advantages(trace)), path)
    assert main(command(trace, tmp_path / "run", "--token-advantages", path)) != ExitCode.OK
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--init-std 0.3", "--init-std"),
        ("--repeat 2 --loss gspo --reduce-token-ids", "--loss and --reduce-token-ids and --repeat"),
    ],
)
@pytest.mark.parametrize(
    "command", ["--trace none --cluster none --run-dir run", "--measured none --simulated none"]
)
def test_compare_without_execute_refuses_execution_flags(
    command: str, flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["compare", *command.split(), *flags.split(), "--quiet"]
    assert main(line) == ExitCode.BAD_INPUT
    error = capsys.readouterr().err
    assert f"{named} would have no effect: no plan is executed" in error
    assert "--execute POLICY" in error


def test_compare_with_measured_executes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line = "compare --measured none --simulated none --execute verl --init-std 0.3"
    assert main(line.split()) == ExitCode.BAD_INPUT
    assert "without --trace, --cluster and --execute" in capsys.readouterr().err
