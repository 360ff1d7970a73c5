"""Flags that say how plans are executed, and what they mean together.

A flag that is not given is None here: its default is that of the option which it sets, so that a
flag which has no effect beside another one can be refused.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import ConfigError

if TYPE_CHECKING:
    from psrl.backend.train.options import ExecuteOptions

DEFAULT_KL_COEFFICIENT = 0.001

# The help text of such a flag says its default.
_NO_HINT = tyro.conf.arg(help_behavior_hint="")
GivenFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
GivenInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
GivenPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Reduction = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class WeightFlags:
    """Weights of the policy and of the reference policy."""

    weights: GivenPath = None
    """Hugging Face directory of the policy's weights; default random ones"""
    reference_weights: GivenPath = None
    """Hugging Face directory of the reference policy's weights; default those of --weights"""
    seed: GivenInt = None
    """seed of random weights; default 0"""
    init_std: GivenFloat = None
    """standard deviation of random weights; default 0.02"""
    reference_perturb: GivenFloat = None
    """the reference policy's random weights differ by this many --init-std; default 0.1"""

    def check(self) -> None:
        """Refuse flags of random weights beside weights that are read."""
        if self.weights is not None:
            _refuse(self, ("seed", "init_std", "reference_perturb"), "--weights")
        elif self.reference_weights is not None:
            _refuse(self, ("reference_perturb",), "--reference-weights")


@dataclass(frozen=True)
class LossFlags:
    """Loss of an update."""

    loss: Literal["ppo_clip", "gspo", "cispo", "sft"] = "ppo_clip"
    """PPO with clipped ratios of tokens, GSPO with ratios of samples, CISPO, or cross-entropy"""
    reduction: Annotated[Reduction | None, _NO_HINT] = None
    """how terms of tokens become one number; default token-mean, with gspo seq-mean-token-mean"""
    fixed_length_tokens: GivenInt = None
    """what seq-mean-token-sum-norm divides a sample's sum by"""
    clip_ratio: GivenFloat = None
    """ratios are clipped from 1 - CLIP_RATIO; default 0.2"""
    clip_ratio_high: GivenFloat = None
    """ratios are clipped to 1 + CLIP_RATIO_HIGH; default --clip-ratio"""
    dual_clip: GivenFloat = None
    """bound on the term of a negative advantage, in units of it; default none"""
    kl_coefficient: GivenFloat = None
    """weight of the KL penalty to the reference policy; default 0.001, with sft 0"""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"] | None, _NO_HINT] = None
    """estimator of the KL divergence (Schulman 2020); default k3"""
    entropy_coefficient: GivenFloat = None
    """weight of the entropy, which is rewarded; default 0"""
    temperature: GivenFloat = None
    """logits are divided by it in all phases; default 1"""
    token_advantages: GivenPath = None
    """Parquet file with an advantage per trained token (columns sample, token, advantage);
    default the trace's advantages of samples"""

    def check(self) -> None:
        """Refuse flags that the loss does not read."""
        chosen = f"--loss {self.loss}"
        if self.loss == "sft":
            unread = ("clip_ratio", "clip_ratio_high", "dual_clip", "token_advantages")
            _refuse(self, unread, chosen)
        elif self.loss == "cispo":
            _refuse(self, ("dual_clip",), chosen)
        elif self.loss == "gspo" and self.reduction not in (None, "seq-mean-token-mean"):
            raise ConfigError(
                f"--reduction {self.reduction} with {chosen} is not GSPO: its ratio belongs to "
                "the sample",
                "leave out --reduction, or pass seq-mean-token-mean",
            )
        if self.reduction == "seq-mean-token-sum-norm":
            if self.fixed_length_tokens is None:
                raise ConfigError(
                    f"--reduction {self.reduction} needs a length to divide by",
                    "pass --fixed-length-tokens, e.g. the longest response",
                )
        else:
            others = "any --reduction but seq-mean-token-sum-norm"
            _refuse(self, ("fixed_length_tokens",), others)
        if self._kl_coefficient == 0.0:
            _refuse(self, ("kl_estimator",), "a --kl-coefficient of 0")

    @property
    def _kl_coefficient(self) -> float:
        if self.kl_coefficient is not None:
            return self.kl_coefficient
        return 0.0 if self.loss == "sft" else DEFAULT_KL_COEFFICIENT

    def values(self) -> dict[str, Any]:
        """Fields of `LossOptions`."""
        given = _given(self) | {"kl_coefficient": self._kl_coefficient}
        del given["loss"]
        given.pop("token_advantages", None)
        if self.loss == "gspo":
            given["reduction"] = "seq-mean-token-mean"
        return {"kind": self.loss} | given


@dataclass(frozen=True)
class OptimizerFlags:
    """AdamW."""

    learning_rate: GivenFloat = None
    """default 1e-6"""
    beta1: GivenFloat = None
    """decay of the momentum; default 0.9"""
    beta2: GivenFloat = None
    """decay of the variance; default 0.95"""
    epsilon: GivenFloat = None
    """added to the root of the variance; default 1e-8"""
    weight_decay: GivenFloat = None
    """default 0"""
    max_gradient_norm: GivenFloat = None
    """gradients are scaled down to this norm; default 1, inf for never"""


@dataclass(frozen=True)
class RouterFlags:
    """Routers of a mixture-of-experts model."""

    router_balance_coefficient: GivenFloat = None
    """weight of the load-balancing loss of each layer; default 0"""
    router_z_coefficient: GivenFloat = None
    """weight of the z-loss of each layer; default 0"""
    router_dispatcher: Annotated[Literal["alltoall", "allgather"] | None, _NO_HINT] = None
    """how tokens travel to the ranks of their experts; default alltoall"""

    def check(self, model: ModelSpec) -> None:
        """Refuse them for a model without experts."""
        if not model.num_moe_experts:
            _refuse(self, [f.name for f in fields(self)], f"{model.name}, which has no experts")

    def values(self) -> dict[str, Any]:
        """Fields of `RouterOptions`."""
        return {name.removeprefix("router_"): value for name, value in _given(self).items()}


@dataclass(frozen=True)
class ExecutionFlags:
    """How plans are executed."""

    weight: WeightFlags = field(default_factory=WeightFlags)
    loss: LossFlags = field(default_factory=LossFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    router: RouterFlags = field(default_factory=RouterFlags)
    dtype: Literal["float32", "float64", "bfloat16"] | None = None
    """working precision; default the one of the plan's device"""
    attention: Literal["triton", "parts", "reference", "sdpa"] | None = None
    """implementation of tree attention; default the fastest on the device"""
    reduce_token_ids: bool = False
    """map the trace's token ids into the model's vocabulary by modulo"""
    warmup: int = 0
    """untimed runs of every phase before the timed ones"""
    repeat: int = 1
    """timed runs of every phase; times are medians"""
    timeout_s: float = 3600.0
    """stop all ranks after this time"""

    def options(
        self,
        model: ModelSpec,
        *,
        keep_gradients: bool = False,
        checkpoint: Path | None = None,
        resume: bool = False,
    ) -> "ExecuteOptions":
        """What the backend takes.

        Raises:
            ConfigError: naming a flag that has no effect beside others or for this model.
        """
        from psrl.backend.model.moe import RouterOptions
        from psrl.backend.train.loss import LossOptions
        from psrl.backend.train.optimizer import OptimizerOptions
        from psrl.backend.train.options import ExecuteOptions

        self.weight.check()
        self.loss.check()
        self.router.check(model)
        return ExecuteOptions(
            **_given(self.weight),
            token_advantages=self.loss.token_advantages,
            dtype=self.dtype,
            implementation=self.attention,
            loss=LossOptions(**self.loss.values()),
            router=RouterOptions(**self.router.values()),
            optimizer=OptimizerOptions(**_given(self.optimizer)),
            warmup=self.warmup,
            repeat=self.repeat,
            reduce_token_ids=self.reduce_token_ids,
            keep_gradients=keep_gradients,
            checkpoint=checkpoint,
            resume=resume,
        )

    def arguments(self) -> list[str]:
        """The flags that differ from their defaults, as a command line with absolute paths."""
        arguments: list[str] = []
        for flag, value in _changed(self):
            arguments.append(flag)
            if value is not True:
                arguments.append(str(value.resolve() if isinstance(value, Path) else value))
        return arguments

    def refuse_all(self, hint: str) -> None:
        """Refuse flags when nothing is executed.

        Raises:
            ConfigError: naming the flags that differ from their defaults.
        """
        given = " and ".join(flag for flag, _ in _changed(self))
        if given:
            raise ConfigError(f"{given} would have no effect: no plan is executed", hint)


def _given(flags: Any) -> dict[str, Any]:
    """Names and values of the flags that are not None."""
    values = {f.name: getattr(flags, f.name) for f in fields(flags)}
    return {name: value for name, value in values.items() if value is not None}


def _refuse(flags: Any, names: Collection[str], beside: str) -> None:
    given = " and ".join(f"--{n.replace('_', '-')}" for n in _given(flags) if n in names)
    if given:
        raise ConfigError(f"{given} would have no effect with {beside}", f"leave out {given}")


def _changed(flags: Any) -> Iterator[tuple[str, Any]]:
    """Names, as on the command line, and values of the flags that differ from their defaults."""
    for flag in fields(flags):
        value = getattr(flags, flag.name)
        if is_dataclass(value):
            yield from _changed(value)
        elif value != flag.default:
            yield "--" + flag.name.replace("_", "-"), value
