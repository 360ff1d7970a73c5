"""Parameters on one device: dense ones and those of its own experts, and who shares them."""

from typing import NamedTuple

from .cluster import ModelSpec, ParallelConfig


class RankParameters(NamedTuple):
    """Parameters on one device.

    Attributes:
        dense: attention, norms, routers or MLPs, and embeddings; of all data-parallel ranks.
        expert: weights of the rank's own experts; of `expert_data_parallel_size` ranks.
    """

    dense: float
    expert: float

    @property
    def total(self) -> float:
        return self.dense + self.expert


def layer_parameters(model: ModelSpec, parallel: ParallelConfig) -> RankParameters:
    """Of one layer. Tensor parallelism divides dense weights, expert parallelism experts alone."""
    experts = model.num_moe_experts * 3 * model.hidden_size * model.moe_ffn_hidden_size
    dense = model.attention_parameters + model.mlp_parameters - experts
    return RankParameters(
        dense / parallel.tensor_model_parallel_size, experts / parallel.expert_model_parallel_size
    )


def embedding_parameters(model: ModelSpec, parallel: ParallelConfig) -> float:
    """Of the embedding, and likewise of the head."""
    return model.embedding_parameters / parallel.tensor_model_parallel_size


def rank_parameters(model: ModelSpec, parallel: ParallelConfig) -> RankParameters:
    """Of all layers of the last stage, and its head; embeddings too where there is one stage."""
    layer, pp = layer_parameters(model, parallel), parallel.pipeline_model_parallel_size
    copies = 2 if pp == 1 and not model.tied_embeddings else 1
    layers, ends = model.num_layers / pp, copies * embedding_parameters(model, parallel)
    return RankParameters(layers * layer.dense + ends, layers * layer.expert)


def expert_data_parallel_size(parallel: ParallelConfig) -> int:
    """Ranks of a stage that hold the same experts, and so reduce and shard them together."""
    devices = parallel.tensor_model_parallel_size * parallel.data_parallel_size
    return devices // parallel.expert_model_parallel_size


def optimizer_shard(model: ModelSpec, parallel: ParallelConfig) -> float:
    """Parameters whose optimizer states one device keeps (Megatron's distributed optimizer)."""
    dense, expert = rank_parameters(model, parallel)
    return dense / parallel.data_parallel_size + expert / expert_data_parallel_size(parallel)


class StageParameters(NamedTuple):
    """Exactly the parameters of one device of a stage, see `RankParameters`."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stage_parameters(model: ModelSpec, parallel: ParallelConfig, stage: int) -> StageParameters:
    """Norms and routers are on every tensor-parallel rank.

    The first stage has the embedding and the last the head, its copy where they are tied over
    several stages.
    """
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    experts = model.num_moe_experts * 3 * model.hidden_size * model.moe_ffn_hidden_size
    whole = (2 + model.num_moe_experts) * model.hidden_size
    whole += 2 * model.kv_channels if model.qk_layernorm else 0
    sliced = model.attention_parameters + model.mlp_parameters - experts - whole
    is_last = stage == pp - 1
    ends = (stage == 0) + (is_last and not (model.tied_embeddings and pp == 1))
    layers = model.num_layers // pp
    return StageParameters(
        dense=layers * (whole + sliced // tp)
        + ends * (model.embedding_parameters // tp)
        + is_last * model.hidden_size,
        expert=layers * experts // parallel.expert_model_parallel_size,
    )
