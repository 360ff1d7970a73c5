"""Cluster files: what is accepted, and that each refusal names the key and what to do."""

from pathlib import Path

import pytest

from psrl.core.cost.cluster import check_layout
from psrl.core.cost.presets import DEVICES, MODELS
from psrl.core.errors import ConfigError
from psrl.core.run.config import Setup, load_setup

CLUSTER = """
[model]
preset = "qwen2.5-7b"

[cluster]
device = "h100-80"
num_hosts = 1
devices_per_host = 8
intra_host_bytes_per_s = 450e9
inter_host_bytes_per_s = 50e9
intra_host_latency_s = 5e-6
inter_host_latency_s = 15e-6

[parallel]
tensor_model_parallel_size = 2
pipeline_model_parallel_size = 2
data_parallel_size = 2
"""


EXPERTS = ("model.num_moe_experts=4", "model.moe_topk=4", "model.moe_ffn_hidden_size=64")


def load(directory: Path, text: str = CLUSTER, *overrides: str) -> Setup:
    path = directory / "cluster.toml"
    path.write_text(text)
    return load_setup(path, overrides)


def test_presets_and_defaults(tmp_path: Path) -> None:
    setup = load(tmp_path)
    assert setup.model == MODELS["qwen2.5-7b"]
    assert setup.cluster.device == DEVICES["h100-80"]
    assert setup.cluster.num_devices == setup.parallel.world_size == 8
    assert setup.planning.max_tokens_per_micro_batch == 16384


def test_preset_with_changed_fields(tmp_path: Path) -> None:
    changed = load(tmp_path, CLUSTER.replace('2.5-7b"', '2.5-7b"\nnum_layers = 4')).model
    assert changed == MODELS["qwen2.5-7b"].model_copy(update={"num_layers": 4})
    device = 'device = {preset = "h100-80", gemm_efficiency = 0.5}'
    changed_device = load(tmp_path, CLUSTER.replace('device = "h100-80"', device)).cluster.device
    assert changed_device == DEVICES["h100-80"].model_copy(update={"gemm_efficiency": 0.5})


def test_model_as_a_bare_name(tmp_path: Path) -> None:
    text = CLUSTER.replace('[model]\npreset = "qwen2.5-7b"', 'model = "qwen2.5-7b"')
    assert load(tmp_path, text).model.name == "qwen2.5-7b"
    assert load(tmp_path, text, "model.num_layers=2").model.num_layers == 2


def test_overrides(tmp_path: Path) -> None:
    setup = load(
        tmp_path,
        CLUSTER,
        "planning.seed=7",
        "cluster.device.memory_bytes=1000",
        'parallel.recompute = "full"',
        "parallel.sequence_parallel=true",
    )
    assert setup.planning.seed == 7
    assert setup.cluster.device.memory_bytes == 1000
    assert setup.cluster.device.name == "h100-80"
    assert (setup.parallel.recompute, setup.parallel.sequence_parallel) == ("full", True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("planning.seed", "cannot read override 'planning.seed'"),
        ("parallel.recompute=full", "cannot read override"),
        ("model.preset.name=1", None),
        ("cluster.num_hosts.x=1", "num_hosts is not a table"),
        ("planning.seeds=1", "unknown key 'planning.seeds'. Did you mean 'seed'?"),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, message: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, CLUSTER, override)
    assert message is None or message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        (
            "[model]",
            "[modle]",
            ["unknown key 'modle'. Did you mean 'model'?", "'model' is missing"],
        ),
        ("num_hosts", "num_host", ["Did you mean 'num_hosts'?", "'cluster.num_hosts' is missing"]),
        ("data_parallel_size", "data_paralel", ["Did you mean 'data_parallel_size'?"]),
        ("qwen2.5-7b", "qwen2.5-7B", ["unknown preset 'qwen2.5-7B'. Did you mean 'qwen2.5-7b'?"]),
        ("h100-80", "h100", ["cluster.device: unknown preset 'h100'", "known presets: a100-40"]),
        ('preset = "qwen2.5-7b"', "preset = [1]", ["model: unknown preset [1]"]),
        ("num_hosts = 1", "num_hosts = 1.0", ["cluster.num_hosts = 1.0", "valid integer"]),
        ("num_hosts = 1", 'num_hosts = "1"', ["cluster.num_hosts = '1'", "valid integer"]),
        ("num_hosts = 1", "num_hosts = 0", ["cluster.num_hosts = 0", "greater than or equal to 1"]),
        ("[parallel]", "[parallel]\nrecompute = 'some'", ["parallel.recompute = 'some'", "'full'"]),
        ("[parallel]", "[parallel]\nsequence_parallel = 1", ["sequence_parallel = 1", "boolean"]),
        ("devices_per_host = 8", "devices_per_host =", ["not valid TOML"]),
    ],
)
def test_wrong_files(tmp_path: Path, old: str, new: str, messages: list[str]) -> None:
    assert old in CLUSTER
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, CLUSTER.replace(old, new))
    for message in [*messages, "cluster.toml"]:
        assert message in str(caught.value)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_setup(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_setup(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("parallel.data_parallel_size=3",),
            r"tensor\(2\) \* pipeline\(2\) \* data\(3\) = 12, but the cluster has "
            r"1 host\(s\) \* 8 = 8 devices",
        ),
        (("model.num_layers=27",), r"num_layers \(27\) .* pipeline_model_parallel_size \(2\)"),
        (("model.vocab_size=152065",), r"vocab_size \(152065\) .* tensor_model_parallel_size"),
        (("model.num_query_groups=7",), r"num_query_groups \(7\) is not divisible"),
        (("model.ffn_hidden_size=3",), r"ffn_hidden_size \(3\) is not divisible"),
        (("model.num_query_groups=8",), r"num_attention_heads \(28\) is not a multiple"),
        (("model.num_moe_experts=4",), r"moe_topk \(0\) must lie in 1\.\.4"),
        (("model.num_moe_experts=4", "model.moe_topk=5"), r"moe_topk \(5\)"),
        (("model.num_moe_experts=4", "model.moe_topk=2"), r"4 experts with moe_ffn_hidden_size 0"),
        (EXPERTS, "needs sequence_parallel"),
        (
            (*EXPERTS, "parallel.expert_model_parallel_size=8"),
            r"num_moe_experts \(4\) .* expert_model_parallel_size \(8\)",
        ),
        (
            (*EXPERTS, "model.num_moe_experts=6", "parallel.expert_model_parallel_size=3"),
            r"expert_model_parallel_size \(3\) must divide tensor\(2\) \* data\(2\) = 4",
        ),
        (("parallel.expert_model_parallel_size=2",), "qwen2.5-7b has no experts"),
    ],
)
def test_layouts_that_do_not_fit(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, CLUSTER, *overrides)


def test_check_layout_accepts_what_divides(tmp_path: Path) -> None:
    sizes = ("parallel.sequence_parallel=true", "parallel.expert_model_parallel_size=4")
    setup = load(tmp_path, CLUSTER, *EXPERTS, *sizes)
    check_layout(setup.model, setup.cluster, setup.parallel)
    assert setup.parallel.world_size == 8
    assert setup.parallel.coupled_ranks == 2


def test_published_sizes() -> None:
    """Total and active parameters in units of 10^9, as the models' names say."""
    for name, total, active in (("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235.1, 22.1)):
        spec = MODELS[name]
        used = spec.num_layers * spec.active_layer_parameters + 2 * spec.embedding_parameters
        assert round(spec.num_parameters / 1e9, 1) == total
        assert round(used / 1e9, 1) == active
