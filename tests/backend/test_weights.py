"""Hugging Face directories: round trips under any layout, the forward, and wrong input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from psrl.backend.launch import model_parallel, run_ranks
from psrl.backend.model.hf_layout import hf_config
from psrl.backend.model.model import build_model
from psrl.backend.model.parameters import ParallelGroups, gather_full
from psrl.backend.model.weights import load_hf, save_hf
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.cost.hf_config import differing_fields, model_from_hf_config
from psrl.core.errors import BackendError, ConfigError
from tests.backend.alone import samples_alone
from tests.backend.cases import TINY, make_case
from tests.backend.test_moe import MOE

QWEN2 = TINY
QWEN2_TIED = TINY.model_copy(update={"tied_embeddings": True})
QWEN3 = TINY.model_copy(update={"qkv_bias": False, "qk_layernorm": True})
SPECS = {"qwen2": QWEN2, "qwen2_tied": QWEN2_TIED, "qwen3": QWEN3, "qwen3_moe": MOE}


def hf_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Random weights by Hugging Face's names, shapes written down from its model classes."""
    rng = torch.Generator().manual_seed(0)
    h, d = spec.hidden_size, spec.kv_channels
    q, kv = spec.num_attention_heads * d, spec.num_query_groups * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, h)
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.q_proj.weight": (q, h)}
        shapes |= {f"{layer}self_attn.{p}_proj.weight": (kv, h) for p in "kv"}
        shapes |= {f"{layer}self_attn.o_proj.weight": (h, q)}
        if spec.qkv_bias:
            shapes |= {f"{layer}self_attn.q_proj.bias": (q,)}
            shapes |= {f"{layer}self_attn.{p}_proj.bias": (kv,) for p in "kv"}
        if spec.qk_layernorm:
            shapes |= {f"{layer}self_attn.{p}_norm.weight": (d,) for p in "qk"}
        mlps, width = [f"{layer}mlp."], spec.ffn_hidden_size
        if spec.num_moe_experts:
            shapes |= {f"{layer}mlp.gate.weight": (spec.num_moe_experts, h)}
            mlps = [f"{layer}mlp.experts.{e}." for e in range(spec.num_moe_experts)]
            width = spec.moe_ffn_hidden_size
        for mlp in mlps:
            shapes |= {f"{mlp}{p}_proj.weight": (width, h) for p in ("gate", "up")}
            shapes |= {f"{mlp}down_proj.weight": (h, width)}
    return {n: 0.3 * torch.randn(s, generator=rng) for n, s in shapes.items()}


def write_hf(directory: Path, spec: ModelSpec, num_files: int = 1) -> dict[str, Tensor]:
    """A Hugging Face directory, in one file or several with an index."""
    directory.mkdir()
    tensors = hf_tensors(spec)
    (directory / "config.json").write_text(json.dumps(hf_config(spec, torch.float32)))
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors")
        return tensors
    weight_map = {}
    for k in range(num_files):
        part = dict(list(tensors.items())[k::num_files])
        file = f"model-{k + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def reference_logprobs(w: dict[str, Tensor], spec: ModelSpec, ids: Tensor) -> Tensor:
    """[tokens, vocabulary] logprobs of one sequence: the published architecture, written plainly.

    Half-split rotary embedding, grouped queries, SwiGLU; experts by softmax over all, then the
    largest normalised.
    """
    count, d = len(ids), spec.kv_channels
    angle = torch.arange(count)[:, None] / spec.rotary_base ** (torch.arange(0, d, 2) / d)
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (x.shape[-1],), w[name], spec.norm_epsilon)

    def mlp(x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (w[f"{prefix}{p}_proj.weight"] for p in ("gate", "up", "down"))
        return linear(silu(linear(x, gate)) * linear(x, up), down)

    def experts(x: Tensor, prefix: str) -> Tensor:
        weight, expert = linear(x, w[f"{prefix}gate.weight"]).softmax(-1).topk(spec.moe_topk)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        rows = [
            sum(
                wt * mlp(x[t], f"{prefix}experts.{int(e)}.")
                for wt, e in zip(weight[t], expert[t], strict=True)
            )
            for t in range(len(x))
        ]
        return torch.stack(rows)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}."
        y = norm(x, f"{layer}input_layernorm.weight")
        heads = []
        for p in "qkv":
            name = f"{layer}self_attn.{p}_proj"
            z = linear(y, w[f"{name}.weight"], w.get(f"{name}.bias")).unflatten(-1, (-1, d))
            if p != "v" and spec.qk_layernorm:
                z = norm(z, f"{layer}self_attn.{p}_norm.weight")
            heads.append(rotate(z) if p != "v" else z)
        repeat = spec.num_attention_heads // spec.num_query_groups
        q, k, v = heads[0], *(z.repeat_interleave(repeat, dim=1) for z in heads[1:])
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        future = torch.ones(count, count).triu(1).bool()
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        x = x + linear(mixed.flatten(1), w[f"{layer}self_attn.o_proj.weight"])
        y = norm(x, f"{layer}post_attention_layernorm.weight")
        x = x + (experts if spec.num_moe_experts else mlp)(y, f"{layer}mlp.")
    head = w["model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"]
    return linear(norm(x, "model.norm.weight"), head).log_softmax(-1)


def make_model(spec: ModelSpec, parallel: ParallelConfig, seed: int = 1) -> Any:
    return build_model(spec, parallel, seed=seed, dtype=torch.float32)


def forward_errors(directories: dict[str, Path]) -> dict[str, float]:
    errors = {}
    with model_parallel(ParallelConfig()):
        for name, directory in directories.items():
            spec = SPECS[name]
            model = make_model(spec, ParallelConfig())
            load_hf(model, spec, directory)
            case = make_case(1)
            case = case.__class__(case.planned, spec, case.inputs, case.loss.__class__())
            with torch.no_grad():
                samples = samples_alone(model, case, torch.float32)
            batch, tensors, error = case.planned.batch, load_tensors(directory), 0.0
            for sample, alone in enumerate(samples):
                spans = batch.sample_loss_spans(sample)
                if not len(spans):
                    continue
                ids = torch.from_numpy(batch.sample_symbols(sample) % spec.vocab_size)
                target = torch.from_numpy(np.concatenate([np.arange(a, z) for a, z in spans]))
                log_p = reference_logprobs(tensors, spec, ids)[target - 1]
                wanted = log_p.gather(1, ids[target][:, None])[:, 0]
                error = max(error, float((alone.logprob - wanted).abs().max()))
            errors[name] = error
    return errors


def load_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def test_loaded_weights_give_the_published_forward(tmp_path: Path) -> None:
    directories = {name: tmp_path / name for name in SPECS}
    for name, directory in directories.items():
        write_hf(directory, SPECS[name])
    errors = run_ranks(forward_errors, 1, directories)[0]
    assert set(errors) == set(SPECS)
    assert max(errors.values()) <= 1e-5, errors


def round_trip(
    spec: ModelSpec, parallel: ParallelConfig, source: Path, target: Path, max_shard_bytes: int
) -> dict[str, Tensor]:
    with model_parallel(parallel):
        model = make_model(spec, parallel)
        load_hf(model, spec, source)
        save_hf(model, spec, target, max_shard_bytes)
        return gather_full(model.named_parameters(), ParallelGroups())


MOE_LAYOUT = ParallelConfig(
    tensor_model_parallel_size=2,
    data_parallel_size=2,
    expert_model_parallel_size=4,
    sequence_parallel=True,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel", "num_files"),
    [
        ("qwen2", ParallelConfig(), 1),
        ("qwen2", ParallelConfig(tensor_model_parallel_size=2), 3),
        ("qwen2_tied", ParallelConfig(pipeline_model_parallel_size=3), 3),
        ("qwen3", ParallelConfig(data_parallel_size=2), 1),
        ("qwen3_moe", ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2), 3),
        pytest.param("qwen3_moe", MOE_LAYOUT, 1, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe",
            ParallelConfig(
                pipeline_model_parallel_size=2, data_parallel_size=2, expert_model_parallel_size=2
            ),
            3,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "tensor2", "tied_pipeline3", "data2", "ep2", "tp2_ep4", "pp2_ep2"],
)
def test_round_trip_is_exact(
    tmp_path: Path, name: str, parallel: ParallelConfig, num_files: int
) -> None:
    spec, source, target = SPECS[name], tmp_path / "source", tmp_path / "target"
    tensors = write_hf(source, spec, num_files)
    limit = 2**40 if num_files == 1 else 20_000
    arguments = (spec, parallel, source, target, limit)
    run_ranks(round_trip, parallel.world_size, *arguments)
    again = load_tensors(target)
    assert set(again) == set(tensors)
    assert all(torch.equal(again[n], tensor) for n, tensor in tensors.items())
    files = list(target.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.partial"))
    if len(files) > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert {target / file for file in index["weight_map"].values()} == set(files)
    else:
        assert files == [target / "model.safetensors"]
    assert json.loads((target / "config.json").read_text())["vocab_size"] == spec.vocab_size


def load_only(spec: ModelSpec, directory: Path) -> None:
    with model_parallel(ParallelConfig()):
        load_hf(make_model(spec, ParallelConfig()), spec, directory)


def damage(directory: Path, what: str) -> ModelSpec:
    """Break a QWEN2 directory; returns the model to load it into."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    config = json.loads((directory / "config.json").read_text())
    if what == "shape":
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name] = tensors[name][:8].clone()
    elif what == "missing":
        del tensors["model.layers.2.mlp.up_proj.weight"]
    elif what == "another model":
        return QWEN2.model_copy(update={"vocab_size": 50})
    elif what == "superfluous":
        tensors["model.layers.1.self_attn.o_proj.bias"] = torch.ones(32)
    elif what == "quantised":
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif what == "index":
        other = "other.safetensors"
        save_file({"model.norm.weight": tensors["model.norm.weight"]}, directory / other)
        weight_map = dict.fromkeys(tensors, path.name) | {"model.norm.weight": other}
        index = {"weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    elif what == "rope":
        config["rope_theta"] = 5.0
    elif what == "new rope":
        del config["rope_theta"]
        config["rope_parameters"] = {"rope_theta": 100.0, "rope_type": "yarn"}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)
    if what == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "empty":
        path.unlink()
    elif what == "no config":
        (directory / "config.json").unlink()
    return QWEN2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"k_proj.weight has shape \[8, 32\], the plan's model needs \[16, 32\]"),
        ("missing", r"1 tensor\(s\) missing: model.layers.2.mlp.up_proj.weight"),
        ("another model", "another model than the plan's tiny: vocab_size is 48, the plan has 50"),
        ("rope", "rotary_base is 5.0, the plan has 100.0"),
        ("new rope", "rope_parameters.rope_type = 'yarn' is not supported"),
        ("truncated", "cannot read .*model.safetensors"),
        ("empty", "holds no safetensors weights"),
        ("superfluous", r"1 tensor\(s\) that nothing would use: .*o_proj.bias"),
        ("quantised", "k_proj.weight is of torch.float8_e4m3fn"),
        ("no config", "cannot read .*config.json"),
        ("index", "holds model.norm.weight, which .* does not place there"),
    ],
)
def test_wrong_directories(tmp_path: Path, what: str, message: str) -> None:
    directory = tmp_path / "weights"
    write_hf(directory, QWEN2)
    spec = damage(directory, what)
    with pytest.raises((BackendError, ConfigError), match=message):
        run_ranks(load_only, 1, spec, directory)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_hf(tmp_path / "source", QWEN2)
    arguments = (QWEN2, ParallelConfig(), tmp_path / "source", tmp_path / "source", 2**40)
    with pytest.raises(ConfigError, match="exists already"):
        run_ranks(round_trip, 1, *arguments)


def test_a_model_of_no_family_is_refused() -> None:
    neither = TINY.model_copy(update={"qk_layernorm": True})
    with pytest.raises(BackendError, match="is none of qwen2, llama, qwen3, qwen3_moe"):
        hf_config(neither, torch.float32)


@pytest.mark.parametrize("name", [*SPECS, "llama"])
def test_the_written_configuration_is_read_as_the_same_model(name: str) -> None:
    spec = SPECS.get(name, TINY.model_copy(update={"qkv_bias": False}))
    again = model_from_hf_config(hf_config(spec, torch.float32), "config.json")
    assert not differing_fields(again, spec)
