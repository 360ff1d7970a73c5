"""psRL's engine behind veRL's TrainingWorker: phases, plans, samples, files, refusals."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs veRL: make test-verl")
pytestmark = pytest.mark.verl

import torch
from safetensors.torch import load_file
from verl.utils import tensordict_utils as tu

from psrl.core.cost.hf_config import model_from_hf_config
from psrl.core.errors import BackendError, ConfigError
from psrl.core.samples.trace import open_trace
from tests.integrations.verl.batches import group_batch, to_batch
from tests.integrations.verl.workers import (
    Loss,
    Outcome,
    infer_request,
    largest_difference,
    make_worker,
    metric,
    on_responses,
    relative_error,
    run_phases,
    update_request,
    weights_of,
    with_phase_results,
)

LOSS = Loss()


def test_phases_of_a_batch_share_plans(tiny_qwen2: Path) -> None:
    batch = group_batch(seed=3)
    actor, reference = (make_worker("psrl", tiny_qwen2) for _ in range(2))
    first = tu.get(actor.infer_batch(infer_request(batch)), "metrics")
    second = tu.get(reference.infer_batch(infer_request(batch)), "metrics")
    assert first["psrl/plan_time_s"][0][0] > 0.0
    assert second["psrl/plan_time_s"][0][0] == 0.0, "the reference planned again"
    trained = run_phases(make_worker("psrl", tiny_qwen2), batch, LOSS, epochs=2)
    (mini, epoch) = trained.metrics["psrl/plan_time_s"]
    assert np.mean(mini) > 0.0
    assert np.mean(epoch) == 0.0, "the second epoch planned again"


def test_metrics_tell_what_was_shared(tiny_qwen2: Path) -> None:
    outcome = run_phases(make_worker("psrl", tiny_qwen2, max_tokens=150), group_batch(), LOSS)
    logical, unique = (metric(outcome, f"psrl/{n}_tokens") for n in ("logical", "unique"))
    assert metric(outcome, "psrl/executed_tokens") >= unique
    assert metric(outcome, "psrl/prefix_match_rate") == pytest.approx(1 - unique / logical)
    assert metric(outcome, "psrl/prefix_match_rate") > 0.3
    assert metric(outcome, "psrl/peak_kv_bytes_max") > 0


def test_batch_without_sharing_says_so(tiny_qwen2: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    rows = [np.concatenate([[i], rng.integers(0, 208, 20)]) for i in range(6)]
    batch = to_batch([r[:8] for r in rows], [r[8:] for r in rows], [np.ones(13, int)] * 6)
    outcome = run_phases(make_worker("psrl", tiny_qwen2), batch, LOSS)
    assert metric(outcome, "psrl/unique_tokens") == metric(outcome, "psrl/logical_tokens") == 126
    assert metric(outcome, "psrl/peak_kv_bytes_max") == 0
    assert "no samples of this batch share a prefix" in caplog.text


def odd_batch() -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], list[str]]:
    """A padding sample, an empty response, a session of two steps, a one-token response."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 208, 12)
    turn, answer, tail = (rng.integers(0, 208, n) for n in (9, 7, 6))
    prompts = [prompt, np.concatenate([prompt, turn, answer]), prompt, prompt, np.full(120, 7)]
    responses = [turn, tail, np.empty(0, int), rng.integers(0, 208, 1), np.full(8, 7)]
    masks = [np.ones(len(r), np.int64) for r in responses]
    masks[4][:] = 0
    return prompts, responses, masks, ["a", "a", "b", "b", "pad"]


def test_padding_and_empty_responses_and_sessions_of_steps(tiny_qwen2: Path) -> None:
    prompts, responses, masks, uid = odd_batch()
    batch = to_batch(prompts, responses, masks, uid)
    loss = Loss(reduction="seq-mean-token-mean")
    wanted = run_phases(make_worker("fsdp2", tiny_qwen2), batch, loss)
    found = run_phases(make_worker("psrl", tiny_qwen2), batch, loss, wanted.logprob)
    assert (found.logprob - wanted.logprob).abs().max() <= 2e-6
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
    assert relative_error(found.gradients, wanted.gradients) <= 5e-6
    assert metric(found, "psrl/logical_tokens") == 12 + 9 + 28 + 6 + 12 + 1


def test_checkpoint_continues_exactly(tiny_qwen2: Path, tmp_path: Path) -> None:
    batch = group_batch(num_groups=4)
    straight = make_worker("psrl", tiny_qwen2)
    first = run_phases(straight, batch, LOSS)
    straight.save_checkpoint(str(tmp_path / "global_step_1" / "actor"), global_step=1)
    again = run_phases(straight, batch, LOSS, first.logprob)
    resumed = make_worker("psrl", tiny_qwen2)
    resumed.load_checkpoint(str(tmp_path / "global_step_1" / "actor"))
    assert largest_difference(weights_of(resumed), first.weights) == 0.0
    found = run_phases(resumed, batch, LOSS, first.logprob)
    assert largest_difference(found.weights, again.weights) == 0.0


def test_old_checkpoints_are_removed(tiny_qwen2: Path, tmp_path: Path) -> None:
    worker = make_worker("psrl", tiny_qwen2)
    for step in (1, 2, 3):
        path = tmp_path / f"global_step_{step}" / "actor"
        worker.save_checkpoint(str(path), global_step=step, max_ckpt_to_keep=2)
    kept = sorted(p.parent.name for p in tmp_path.glob("*/actor"))
    assert kept == ["global_step_2", "global_step_3"]


def test_rollout_gets_every_weight(tiny_qwen2: Path) -> None:
    stored = load_file(tiny_qwen2 / "model.safetensors")
    assert largest_difference(weights_of(make_worker("psrl", tiny_qwen2)), stored) == 0.0


def test_exported_batch_executes_to_the_logged_loss(tiny_qwen2: Path, tmp_path: Path) -> None:
    """Hook, `psrl trace validate`, `psrl plan`, `psrl execute`: the loss that veRL logged."""
    export = {"trace_dir": str(tmp_path / "traces")}
    worker = make_worker("psrl", tiny_qwen2, psrl=export)
    # On-policy, as the first update of an iteration; the penalty makes the loss tell logprobs.
    batch, loss = group_batch(num_groups=4), Loss(entropy=0.0, kl=True)
    worker.set_loss_fn(loss.function())
    inferred = worker.infer_batch(infer_request(batch))
    logprob = on_responses(inferred["log_probs"], batch)
    ready = with_phase_results(batch, logprob)
    response_lengths = batch["response_mask"].offsets().diff().tolist()
    for name in ("old_log_probs", "ref_log_prob"):
        rows = [logprob[i, :n].contiguous() for i, n in enumerate(response_lengths)]
        ready[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    trained = worker.train_mini_batch(update_request(ready, loss, 8, epochs=2))
    logged = tu.get(trained, "metrics")["loss"]
    directory = tmp_path / "traces" / "iteration_000000"
    recorded = open_trace(directory).iteration(0)
    assert recorded.mini_batch.tolist() == [0] * 8 + [1] * 8
    assert sorted(set(recorded.group_id.tolist())) == [f"task-{i}" for i in range(4)]
    setup = tmp_path / "setup.toml"
    setup.write_text(SETUP)
    psrl("trace", "validate", directory)
    psrl("plan", "--trace", directory, "--cluster", setup, "--out", tmp_path / "plan")
    metrics = psrl(
        *("execute", tmp_path / "plan", "--trace", directory, "--run-dir", tmp_path / "run"),
        *("--weights", tiny_qwen2, "--token-advantages", directory / "tokens.parquet"),
        *("--temperature", "0.9", "--kl-coefficient", "0.1", "--dtype", "float32"),
        *("--learning-rate", "1e-3", "--beta2", "0.999", "--max-gradient-norm", "1e9"),
        *("--clip-ratio", "0.2", "--clip-ratio-high", "0.28", "--dual-clip", "3.0"),
    )
    assert metrics["loss"] == pytest.approx(logged[:2], rel=1e-5)


SETUP = """
[model]
name = "tiny-qwen2"
num_layers = 4
hidden_size = 48
num_attention_heads = 4
num_query_groups = 2
kv_channels = 12
ffn_hidden_size = 96
vocab_size = 208
rotary_base = 10000.0

[cluster]
device = "h100-80"
num_hosts = 1
devices_per_host = 1
intra_host_bytes_per_s = 450e9
inter_host_bytes_per_s = 50e9
intra_host_latency_s = 5e-6
inter_host_latency_s = 15e-6

[parallel]

[planning]
max_tokens_per_micro_batch = 150
"""


def psrl(*arguments: object) -> dict[str, object]:
    """Run the command line in a process of its own."""
    program = Path(sys.executable).with_name("psrl")
    command = [str(program), *map(str, arguments), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report: dict[str, object] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ({"context_parallel_size": 2}, "megatron.context_parallel_size = 2"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size"),
        ({"use_megatron_fsdp": True}, "megatron.use_megatron_fsdp"),
        (
            {"override_transformer_config": {"hidden_dropout": 0.1}},
            "megatron.override_transformer_config.hidden_dropout",
        ),
        (
            {"override_transformer_config": {"recompute_granularity": "selective"}},
            "recompute_granularity=full",
        ),
        ({"psrl": {"polcy": "psrl"}}, "unknown key 'polcy'"),
        ({"psrl": {"policy": "psr"}}, "Did you mean 'psrl'"),
        ({"psrl": {"device": "h999"}}, "megatron.psrl.device"),
        ({"tensor_model_parallel_size": 2}, "not a multiple"),
    ],
)
def test_refused_configuration_names_the_key(
    tiny_qwen2: Path, engine: dict[str, object], key: str
) -> None:
    with pytest.raises((BackendError, ConfigError)) as caught:
        make_worker("psrl", tiny_qwen2, **engine)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_unsupported_model_is_refused(
    tiny_qwen2: Path, changed: dict[str, object], message: str
) -> None:
    config = json.loads((tiny_qwen2 / "config.json").read_text())
    assert model_from_hf_config(config, "here").num_layers == 4
    with pytest.raises(ConfigError, match=message):
        model_from_hf_config(config | changed, "here")


def refused_update(outcome_of: Path, loss: Loss, **fields: object) -> str:
    worker = make_worker("psrl", outcome_of)
    worker.set_loss_fn(loss.function())
    batch = group_batch(num_groups=1)
    ready = with_phase_results(batch, torch.zeros(batch["response_mask"].to_padded_tensor(0).shape))
    request = update_request(ready, loss, None, 1)
    tu.assign_non_tensor(request, **fields)
    with pytest.raises(BackendError) as caught:
        worker.train_mini_batch(request)
    return str(caught.value)


def test_refused_batches_name_the_key(tiny_qwen2: Path) -> None:
    assert "use_dynamic_bsz=True" in refused_update(tiny_qwen2, LOSS, use_dynamic_bsz=False)
    random = refused_update(tiny_qwen2, replace(LOSS, mode="clip_cov"))
    assert "actor.policy_loss.loss_mode = clip_cov" in random
    images = [{"pixel_values": 1}] * 4
    assert "multi_modal_inputs" in refused_update(tiny_qwen2, LOSS, multi_modal_inputs=images)


def test_update_without_a_trained_token_is_refused(tiny_qwen2: Path) -> None:
    rows = [np.arange(5) + i for i in range(2)]
    batch = to_batch(rows, rows, [np.zeros(5, np.int64)] * 2)
    with pytest.raises(BackendError, match="no trained token"):
        run_phases(make_worker("psrl", tiny_qwen2), batch, LOSS)


def test_hydra_overrides_choose_the_engine() -> None:
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    from psrl.integrations.verl.plugin import PsrlEngineConfig

    actor = "actor_rollout_ref.actor"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "model_engine=megatron",
                f"{actor}.megatron._target_=psrl.integrations.verl.plugin.PsrlEngineConfig",
                f"+{actor}.megatron.psrl.device=h100-80",
                f"{actor}.use_dynamic_bsz=True",
                f"{actor}.ppo_mini_batch_size=8",
            ],
        )
    chosen = omega_conf_to_dataclass(config.actor_rollout_ref.actor.megatron)
    assert isinstance(chosen, PsrlEngineConfig)
    assert dict(chosen.psrl) == {"device": "h100-80"}


def test_engine_of_another_configuration_is_verls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine import EngineRegistry

    engines = EngineRegistry._engines["language_model"]["megatron"]
    made: list[dict[str, object]] = []
    monkeypatch.setitem(engines, "cuda", lambda **arguments: made.append(arguments))
    config = McoreEngineConfig(tensor_model_parallel_size=2)
    EngineRegistry.new("language_model", "megatron", engine_config=config, model_config=None)
    assert made == [{"engine_config": config, "model_config": None}]
    assert "veRL's own engine runs it" in caplog.text


def test_configuration_registers_the_engine_without_the_variable() -> None:
    code = """
from psrl.integrations.verl.plugin import PsrlEngineConfig
from verl.workers.engine import EngineRegistry
print(EngineRegistry.get_engine_cls("language_model", "megatron").__name__)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    environment |= {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1:] == ["MegatronEngine"], result.stderr


def test_offload_hooks_leave_a_cpu_alone(tiny_qwen2: Path) -> None:
    worker = make_worker("psrl", tiny_qwen2, param_offload=True, optimizer_offload=True)
    before = weights_of(worker)
    worker.to("cpu")
    worker.to("device")
    assert largest_difference(weights_of(worker), before) == 0.0


def test_outcome_is_the_same_with_any_cut(tiny_qwen2: Path) -> None:
    outcomes: list[Outcome] = [
        run_phases(make_worker("psrl", tiny_qwen2, max_tokens=m), group_batch(), LOSS)
        for m in (100, 10_000)
    ]
    assert metric(outcomes[1], "psrl/num_micro_batches") < 2
    assert relative_error(outcomes[0].gradients, outcomes[1].gradients) <= 5e-6


def test_example_configuration_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass

    from psrl.integrations.verl.plugin import PsrlEngineConfig
    from psrl.integrations.verl.settings.options import parse_options
    from psrl.integrations.verl.settings.refusals import check_configuration, parallel_config

    monkeypatch.setenv("MODEL", "model")
    monkeypatch.setenv("DATA", "data")
    examples = Path(__file__).resolve().parents[3] / "examples" / "verl"
    with initialize_config_dir(str(examples), version_base=None):
        config = compose("psrl_grpo").actor_rollout_ref
    for role in ("actor", "ref"):
        engine = omega_conf_to_dataclass(config[role].megatron)
        assert isinstance(engine, PsrlEngineConfig)
        assert parse_options(engine.psrl).memory_fraction == 0.85
        check_configuration(engine, config.model, config.actor.optim)
        assert parallel_config(engine, 8).data_parallel_size == 4
