"""What a user's environment says before veRL is imported, and a tiny model."""

import os
from pathlib import Path

import pytest

os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_USE_EXTERNAL_MODULES="psrl.integrations.verl.cpu_platform,psrl.integrations.verl.plugin",
    VERL_DISABLE_FLASH_ATTN_CE="1",
    VERL_LOGGING_LEVEL="ERROR",
)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 on disk whose weights are so large that every token matters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=208,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        attention_dropout=0.0,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.05 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    directory = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    model.save_pretrained(directory)
    return directory
