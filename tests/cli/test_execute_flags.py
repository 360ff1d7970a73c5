"""Flags of `psrl execute`: every option can be set, and flags that do not go together are named."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro

from psrl.backend.options import AttentionName, ExecuteOptions, changed
from psrl.cli import main
from psrl.core.errors import ExitCode, PsrlError
from psrl.core.plan.plan import PHASES
from psrl.core.samples.trace import Trace
from psrl.kernels.attention.tree_attention import Implementation
from tests.backend.cases import TINY
from tests.backend.test_execute import make_plan, make_trace
from tests.backend.test_moe import MOE


def parse(line: str) -> ExecuteOptions:
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(ExecuteOptions, args=line.split(), config=config)


def test_without_flags_the_options_have_their_defaults() -> None:
    assert parse("") == ExecuteOptions()
    assert list(changed(parse(""))) == []
    ExecuteOptions().check(TINY, PHASES)


EVERYTHING = (
    "--seed 3 --init-std 0.5 --reference-perturb 0.25 --token-advantages {file} "
    "--reduce-token-ids --dtype float64 --attention sdpa --warmup 1 --repeat 2 --timeout-s 60.0 "
    "--reduction seq-mean-token-sum-norm --fixed-length-tokens 64 --clip-ratio 0.1 "
    "--clip-ratio-high 0.3 --dual-clip 3.0 --kl-coefficient 0.5 --kl-estimator k2 "
    "--entropy-coefficient 0.01 --temperature 0.6 "
    "--learning-rate 0.01 --beta1 0.8 --beta2 0.9 --epsilon 1e-06 --weight-decay 0.1 "
    "--max-gradient-norm inf --on-nonfinite skip "
    "--router-balance-coefficient 0.7 --router-z-coefficient 0.05 "
    "--router-dispatcher allgather --keep-gradients --checkpoint /c --resume"
)


def test_every_option_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "advantages.parquet").touch()
    line = EVERYTHING.format(file=tmp_path / "advantages.parquet")
    options = parse(line)
    options.check(MOE, PHASES)
    given = [(flag, *([] if value is True else [str(value)])) for flag, value in changed(options)]
    assert " ".join(word for words in given for word in words) == line
    unset = {"weights", "reference_weights", "kind"}
    default = ExecuteOptions()
    for found, before in (
        (options, default),
        (options.loss, default.loss),
        (options.router, default.router),
        (options.optimizer, default.optimizer),
    ):
        for field in fields(found):
            if field.name not in unset:
                assert getattr(found, field.name) != getattr(before, field.name), field.name


@pytest.mark.parametrize(
    ("line", "kind", "reduction", "kl_weight"),
    [
        ("--loss gspo", "gspo", "seq-mean-token-mean", 0.001),
        ("--loss cispo --kl-coefficient 0", "cispo", "token-mean", 0.0),
        ("--loss sft", "sft", "token-mean", 0.0),
        ("--loss sft --kl-coefficient 0.1 --kl-estimator k1", "sft", "token-mean", 0.1),
    ],
)
def test_losses(line: str, kind: str, reduction: str, kl_weight: float) -> None:
    loss = parse(line).loss
    assert (loss.kind, loss.term_reduction, loss.kl_weight) == (kind, reduction, kl_weight)


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
        ("--resume", "--resume has no directory to resume from: add --checkpoint DIR"),
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
        parse(line).check(TINY, PHASES)
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
        ("--learning-rate nan", "--learning-rate nan is refused: it must be finite and 0 or more"),
        ("--max-gradient-norm nan", "--max-gradient-norm nan"),
        ("--entropy-coefficient inf", "--entropy-coefficient inf"),
        ("--fixed-length-tokens 0", "--fixed-length-tokens 0"),
        ("--router-z-coefficient nan", "--router-z-coefficient nan"),
        ("--reference-perturb nan", "--reference-perturb nan"),
        ("--timeout-s 0", "--timeout-s 0.0"),
        ("--seed -1", "--seed -1"),
        ("--seed 9223372036854775808", "below 2^63"),
        ("--init-std -1", "--init-std -1.0"),
        ("--repeat 0", "--repeat 0"),
        ("--warmup -1", "--warmup -1"),
        ("--token-advantages none.parquet", "none.parquet is refused: it must be a file"),
        ("--weights none", "--weights none is refused: it must be a directory with safetensors"),
    ],
)
def test_values_out_of_range(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main(command(trace, tmp_path / "run", *flags.split())) == ExitCode.BAD_INPUT
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_are_named_before_torch_is_imported(trace: Trace, tmp_path: Path) -> None:
    flags = ("--weights", "nope", "--repeat", "0", "--learning-rate", "nan", "--loss", "sft")
    words = command(trace, tmp_path / "run", *flags, "--dual-clip", "2")
    code = (
        "import sys; from psrl.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert found.returncode == ExitCode.BAD_INPUT, found.stderr
    for flag in ("--weights nope", "--repeat 0", "--learning-rate nan", "--dual-clip would have"):
        assert flag in found.stderr


def test_attention_names_are_those_of_the_kernels() -> None:
    assert set(get_args(AttentionName)) == set(get_args(Implementation))


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
    assert main(command(trace, tmp_path / "run", "--token-advantages", path)) == ExitCode.BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--init-std 0.3", "--init-std"),
        ("--repeat 2 --loss gspo --reduce-token-ids", "--reduce-token-ids and --repeat and --loss"),
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
