"""Checkpoints and configurations as transformers writes them: equal results, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.model import build_model
from psrl.backend.model.weights import load_hf
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.cost.hf_config import model_from_hf_config, read_hf_config
from psrl.core.errors import PsrlError
from tests.backend.alone import samples_alone
from tests.backend.cases import Case, make_case

pytestmark = [pytest.mark.verl, pytest.mark.slow]

_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 moe": ("Qwen3Moe", _MOE | {"norm_topk_prob": True}),
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": None}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mistral window": ("Mistral", {"sliding_window": 16}, "sliding_window = 16"),
    "qwen2 window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        "use_sliding_window = True",
    ),
    "gemma": ("Gemma", {}, "model_type 'gemma'"),
    "gemma2": ("Gemma2", {}, "model_type 'gemma2'"),
    "granite": ("Granite", {"embedding_multiplier": 12.0}, "model_type 'granite'"),
    "nope layers": ("SmolLM3", {}, "model_type 'smollm3'"),
    "o_proj bias": ("Llama", {"attention_bias": True}, "attention_bias must be false"),
    "mlp bias": ("Llama", {"mlp_bias": True}, "mlp_bias = True"),
    "gelu": ("Llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "llama3 rope": ("Llama", {"rope_parameters": _LLAMA3}, "rope_type = 'llama3'"),
    "shared expert": (
        "Qwen2Moe",
        _MOE | {"shared_expert_intermediate_size": 32},
        "model_type 'qwen2_moe'",
    ),
    "unnormalised experts": ("Qwen3Moe", _MOE | {"norm_topk_prob": False}, "norm_topk_prob"),
    "dense layers": (
        "Qwen3Moe",
        _MOE | {"norm_topk_prob": True, "mlp_only_layers": [0]},
        "mlp_only",
    ),
    "dropout": ("Qwen3", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    "mixtral": ("Mixtral", {}, "model_type 'mixtral'"),
}


def write(directory: Path, family: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(_SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else parameter.add_(
                0.1 * torch.randn_like(parameter)
            )
    model.save_pretrained(directory)
    return model


def our_logprobs(directory: Path, spec: ModelSpec) -> list[torch.Tensor]:
    """Logprobs of the trained tokens of each sample of a case, each sample by itself."""
    with model_parallel(ParallelConfig()):
        model = build_model(spec, ParallelConfig(), seed=1, dtype=torch.float32)
        load_hf(model, spec, directory)
        return [
            alone.logprob.detach() for alone in samples_alone(model, case_of(spec), torch.float32)
        ]


def case_of(spec: ModelSpec) -> Case:
    case = make_case(1)
    return Case(case.planned, spec, case.inputs, type(case.loss)())


def largest_error(model: Any, spec: ModelSpec, ours: list[torch.Tensor]) -> float:
    batch, error = case_of(spec).planned.batch, 0.0
    assert sum(len(logprob) for logprob in ours) > 10
    for sample, logprob in enumerate(ours):
        ids = torch.from_numpy(batch.sample_symbols(sample) % spec.vocab_size)
        target = [t for a, z in batch.sample_loss_spans(sample).tolist() for t in range(a, z)]
        if target:
            log_p = model(ids[None]).logits[0].log_softmax(-1)
            wanted = log_p[torch.tensor(target) - 1, ids[target]]
            error = max(error, float((logprob - wanted).abs().max().detach()))
    return error


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_models_equal_transformers(tmp_path: Path, name: str) -> None:
    family, changes = SUPPORTED[name]
    model = write(tmp_path / "model", family, changes)
    spec = read_hf_config(tmp_path / "model")
    assert model_from_hf_config(model.config.to_dict(), "here").hidden_size == spec.hidden_size
    ours = run_ranks(our_logprobs, 1, tmp_path / "model", spec)[0]
    assert largest_error(model, spec, ours) <= 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(tmp_path: Path, name: str) -> None:
    family, changes, words = REFUSED[name]
    model = write(tmp_path / "model", family, changes)
    for read in (
        lambda: read_hf_config(tmp_path / "model"),
        lambda: model_from_hf_config(model.config.to_dict(), "here"),
    ):
        with pytest.raises(PsrlError) as caught:
            read()
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("planned", "stored"), [("llama", "qwen2"), ("llama", "qwen3"), ("qwen2", "llama")]
)
def test_a_plan_of_another_model_is_refused(tmp_path: Path, planned: str, stored: str) -> None:
    """Without the checkpoint's qkv bias or query/key norm, or with one that it lacks."""
    specs = {}
    for name in (planned, stored):
        write(tmp_path / name, *SUPPORTED[name])
        specs[name] = read_hf_config(tmp_path / name)
    with pytest.raises(PsrlError, match="is of another model than the plan's"):
        run_ranks(our_logprobs, 1, tmp_path / stored, specs[planned])
