"""Two iterations of veRL's TrainingWorker with psRL's engine on a CPU, with a tiny random model.

Needs no GPU and no data; run it in the environment of `make test-verl`:

    .venv-verl/bin/python examples/verl/train_on_cpu.py [TRACE_DIR]
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

# Set before veRL is imported; a shell would export them.
os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_USE_EXTERNAL_MODULES="psrl.integrations.verl.cpu_platform,psrl.integrations.verl.plugin",
    VERL_DISABLE_FLASH_ATTN_CE="1",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
    RANK="0",
    LOCAL_RANK="0",
    WORLD_SIZE="1",
)

import numpy as np
import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    HFModelConfig,
    McoreActorConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from psrl.integrations.verl.cpu_platform import join_process_group
from psrl.integrations.verl.plugin import PsrlEngineConfig

VOCABULARY, NUM_GROUPS, NUM_ROLLOUTS = 512, 8, 4


def write_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def make_worker(model: Path, trace_dir: str | None) -> TrainingWorker:
    join_process_group()
    budget = {"max_token_len_per_gpu": 512, "infer_max_token_len_per_gpu": 1024}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(model), load_tokenizer=False),
            engine_config=PsrlEngineConfig(
                dtype="float32", psrl={"device": "h100-80", "trace_dir": trace_dir}, **budget
            ),
            optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor = McoreActorConfig(
        rollout_n=NUM_ROLLOUTS, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def rollouts(seed: int) -> TensorDict:
    """What a rollout would give: prompts with several answers each, in veRL's layout."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {"prompts": [], "responses": [], "advantages": []}
    for _ in range(NUM_GROUPS):
        prompt = torch.from_numpy(rng.integers(0, VOCABULARY, rng.integers(60, 120)))
        for _ in range(NUM_ROLLOUTS):
            response = torch.from_numpy(rng.integers(0, VOCABULARY, rng.integers(10, 60)))
            rows["prompts"].append(prompt)
            rows["responses"].append(response)
            rows["advantages"].append(torch.full((len(response),), rng.normal()).float())
    pairs = zip(rows["prompts"], rows["responses"], strict=True)
    rows["input_ids"] = [torch.cat(pair) for pair in pairs]
    rows["response_mask"] = [torch.ones_like(response) for response in rows["responses"]]
    fields = {n: torch.nested.as_nested_tensor(r, layout=torch.jagged) for n, r in rows.items()}
    fields["loss_mask"] = fields["response_mask"]
    batch = TensorDict(fields, batch_size=[NUM_GROUPS * NUM_ROLLOUTS])
    tasks = [f"task-{seed}-{i // NUM_ROLLOUTS}" for i in range(len(batch))]
    tu.assign_non_tensor_stack(batch, "uid", tasks)
    return batch


def iteration(worker: TrainingWorker, batch: TensorDict) -> None:
    request = batch.clone()
    tu.assign_non_tensor(
        request, calculate_entropy=True, compute_loss=False, temperature=1.0, global_token_num=None
    )
    output = worker.infer_batch(request)
    batch["old_log_probs"] = response_from_nested(output["log_probs"], batch["response_mask"])
    size = len(batch) // 2
    tu.assign_non_tensor(
        batch,
        calculate_entropy=False,
        temperature=1.0,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
    )
    metrics = tu.get(worker.train_mini_batch(batch), "metrics")
    for step, loss in enumerate(metrics["loss"]):
        norm, logical, unique, plan_s = (
            metrics[name][step]
            for name in (
                "grad_norm",
                "psrl/logical_tokens",
                "psrl/unique_tokens",
                "psrl/plan_time_s",
            )
        )
        print(
            f"optimizer step {step}: loss {loss:+.5f}, gradient norm {norm:.4f}, {logical:,} "
            f"tokens of which {unique:,} are computed, planned in {plan_s:.3f} s"
        )


def main() -> None:
    trace_dir = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory) / "model")
        worker = make_worker(Path(directory) / "model", trace_dir)
        for seed in range(2):
            print(f"iteration {seed}")
            iteration(worker, rollouts(seed))
    if trace_dir is not None:
        print(f"traces in {trace_dir}: psrl trace stats {trace_dir}/iteration_000000")


if __name__ == "__main__":
    main()
