"""Published shapes of models and data-sheet figures of devices.

Models: the `config.json` of each Hugging Face release. Devices: vendor data sheets (dense bf16
peak, HBM size and bandwidth). Efficiencies and host times are assumptions of the roofline, in
line with the large-GEMM share measured on public H200 tables (0.75 of peak) and a Megatron layer
forward launched in about 0.5 ms.
"""

from .cluster import DeviceSpec, ModelSpec

_GIB = 2**30


def _qwen25(
    name: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, tied: bool
) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        tied_embeddings=tied,
    )


def _qwen3_moe(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    experts: int,
    topk: int,
    expert_ffn: int,
    *,
    head_dim: int = 128,
    vocab: int = 151936,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=head_dim,
        ffn_hidden_size=topk * expert_ffn,
        vocab_size=vocab,
        qkv_bias=False,
        qk_layernorm=True,
        num_moe_experts=experts,
        moe_topk=topk,
        moe_ffn_hidden_size=expert_ffn,
    )


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _qwen25("qwen2.5-tiny", 4, 256, 8, 2, 704, 8192, True),
        _qwen25("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, True),
        _qwen25("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, True),
        _qwen25("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, False),
        _qwen25("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, False),
        _qwen25("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, False),
        _qwen3_moe("qwen3-moe-tiny", 4, 256, 8, 2, 8, 2, 192, head_dim=32, vocab=8192),
        _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 8, 768),
        _qwen3_moe("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 8, 1536),
    )
}


def _device(
    name: str, tflops: float, gib: int, tb_per_s: float, host_layer_s: float = 0.5e-3
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        memory_bytes=gib * _GIB,
        memory_bandwidth_bytes_per_s=tb_per_s * 1e12,
        gemm_efficiency=0.75,
        attention_efficiency=0.5,
        host_layer_s=host_layer_s,
    )


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _device("a100-40", 312, 40, 1.555),
        _device("a100-80", 312, 80, 2.039),
        _device("h100-80", 989, 80, 3.35),
        _device("h200-141", 989, 141, 4.8),
        _device("h20-96", 148, 96, 4.0),
        _device("b200-180", 2250, 180, 8.0),
    )
}
