"""What a user can choose about an execution: the command line's flags come from these classes.

Every field's text is the help of its flag, its type says which values are allowed. Nothing here
imports torch, so a mistake is found before anything expensive starts, and all of them at once.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import arg

from psrl.core.cost.cluster import ModelSpec
from psrl.core.errors import ConfigError

LossKind = Literal["ppo_clip", "gspo", "cispo", "sft"]
Reduction = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlEstimator = Literal["k1", "k2", "k3"]
Dispatcher = Literal["alltoall", "allgather"]
DtypeName = Literal["float32", "float64", "bfloat16"]
AttentionName = Literal["triton", "parts", "reference", "sdpa"]

TIMEOUT_S = 3600.0
"""Limit of a run whose caller sets none: it ends hangs, so it is far above any time under load."""
DTYPE_OF_BYTES: dict[int, DtypeName] = {2: "bfloat16", 4: "float32", 8: "float64"}


@dataclass(frozen=True)
class Allowed:
    """Which values of a field are allowed, beside its type; NaN is not where numbers compare."""

    what: str
    holds: Callable[[Any], bool]


NonNegative = Annotated[float, Allowed("finite and 0 or more", lambda x: 0.0 <= x < math.inf)]
Positive = Annotated[float, Allowed("finite and positive", lambda x: 0.0 < x < math.inf)]
Finite = Annotated[float, Allowed("finite", math.isfinite)]
Decay = Annotated[float, Allowed("in [0, 1)", lambda x: 0.0 <= x < 1.0)]
Limit = Annotated[float, Allowed("positive", lambda x: x > 0.0)]
DualClip = Annotated[float, Allowed("finite and more than 1", lambda x: 1.0 < x < math.inf)]
Count = Annotated[int, Allowed("1 or more", lambda n: n >= 1)]
CountOrZero = Annotated[int, Allowed("0 or more", lambda n: n >= 0)]
Seed = Annotated[int, Allowed("0 or more and below 2^63", lambda n: 0 <= n < 2**63)]
WeightsDirectory = Annotated[
    Path,
    Allowed("a directory with safetensors weights", lambda p: any(p.glob("*.safetensors"))),
]
ExistingFile = Annotated[Path, Allowed("a file", Path.is_file)]


@dataclass(frozen=True)
class LossOptions:
    """Loss of an update, and its coefficients.

    The mean is over all trained tokens, or over the samples with a trained token of each one's
    sum, mean, or sum divided by a fixed length.
    """

    kind: Annotated[LossKind, arg(name="loss")] = "ppo_clip"
    """PPO with clipped ratios of tokens, GSPO with ratios of samples, CISPO, or cross-entropy"""
    reduction: Reduction | None = None
    """how terms of tokens become one number, by veRL's names; None: token-mean, with gspo
    seq-mean-token-mean"""
    fixed_length_tokens: Count | None = None
    """what seq-mean-token-sum-norm divides a sample's sum by"""
    clip_ratio: Positive = 0.2
    """ratios are clipped from 1 - CLIP_RATIO"""
    clip_ratio_high: Positive | None = None
    """ratios are clipped to 1 + CLIP_RATIO_HIGH; None: as --clip-ratio"""
    dual_clip: DualClip | None = None
    """PPO's bound on the term of a negative advantage, in units of it; None: no bound"""
    kl_coefficient: NonNegative | None = None
    """weight of the KL penalty to the reference policy; None: 0.001, with sft 0"""
    kl_estimator: KlEstimator = "k3"
    """estimator of the KL divergence (Schulman, "Approximating KL divergence", 2020)"""
    entropy_coefficient: Finite = 0.0
    """weight of the entropy, which is rewarded"""
    temperature: Positive = 1.0
    """logits are divided by it in all phases"""

    @property
    def term_reduction(self) -> Reduction:
        if self.reduction is not None:
            return self.reduction
        return "seq-mean-token-mean" if self.kind == "gspo" else "token-mean"

    @property
    def kl_weight(self) -> float:
        if self.kl_coefficient is not None:
            return self.kl_coefficient
        return 0.0 if self.kind == "sft" else 0.001

    @property
    def needs_old_logprob(self) -> bool:
        return self.kind != "sft"

    @property
    def needs_reference(self) -> bool:
        return self.kl_weight != 0.0

    @property
    def needs_sequence_ratio(self) -> bool:
        """Whether an update must run a forward without gradients first."""
        return self.kind == "gspo"

    @property
    def ratio_limits(self) -> tuple[float, float]:
        """Smallest and largest ratio after clipping."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - self.clip_ratio, 1.0 + high

    def conflicts(self) -> Iterator[str]:
        """Options that do not go together."""
        chosen = f"--loss {self.kind}"
        unread = {"sft": ("clip_ratio", "clip_ratio_high", "dual_clip"), "cispo": ("dual_clip",)}
        yield from without_effect(self, unread.get(self.kind, ()), chosen)
        if self.kind == "gspo" and self.term_reduction != "seq-mean-token-mean":
            yield (
                f"--reduction {self.reduction} with {chosen} is not GSPO, whose ratio belongs to "
                "the sample: leave out --reduction, or pass seq-mean-token-mean"
            )
        if self.reduction != "seq-mean-token-sum-norm":
            others = "any --reduction but seq-mean-token-sum-norm"
            yield from without_effect(self, ("fixed_length_tokens",), others)
        elif self.fixed_length_tokens is None:
            yield (
                f"--reduction {self.reduction} needs a length to divide by: pass "
                "--fixed-length-tokens, e.g. the longest response"
            )
        if not self.needs_reference:
            yield from without_effect(self, ("kl_estimator",), "a --kl-coefficient of 0")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter, 2019), with clipping by the global gradient norm."""

    learning_rate: NonNegative = 1e-6
    """step size"""
    beta1: Decay = 0.9
    """decay of the momentum"""
    beta2: Decay = 0.95
    """decay of the variance"""
    epsilon: Positive = 1e-8
    """added to the root of the variance"""
    weight_decay: NonNegative = 0.0
    """decay of all weights, in units of the learning rate"""
    max_gradient_norm: Limit = 1.0
    """gradients are scaled down to this norm; inf: never"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """when loss or gradients are not finite: end the run, or leave that step out and count it"""


@dataclass(frozen=True)
class RouterOptions:
    """Routers of a mixture-of-experts model: their losses, added to the loss of an update."""

    balance_coefficient: Annotated[NonNegative, arg(name="router-balance-coefficient")] = 0.0
    """weight of the load-balancing loss of each layer"""
    z_coefficient: Annotated[NonNegative, arg(name="router-z-coefficient")] = 0.0
    """weight of the z-loss of each layer"""
    dispatcher: Annotated[Dispatcher, arg(name="router-dispatcher")] = "alltoall"
    """how tokens travel to the ranks of their experts"""

    @property
    def needs_fraction(self) -> bool:
        """Whether an update must run a forward without gradients first."""
        return self.balance_coefficient != 0.0


@dataclass(frozen=True)
class PhaseOptions:
    """How the phases of a plan run."""

    weights: WeightsDirectory | None = None
    """Hugging Face directory of the policy's weights; None: random ones"""
    reference_weights: WeightsDirectory | None = None
    """Hugging Face directory of the reference policy's weights; None: those of --weights"""
    seed: Seed = 0
    """seed of random weights"""
    init_std: Positive = 0.02
    """standard deviation of random weights"""
    reference_perturb: NonNegative = 0.1
    """the reference policy's random weights differ by this many --init-std"""
    token_advantages: ExistingFile | None = None
    """Parquet file with an advantage per trained token (columns sample, token, advantage); None:
    the trace's advantages of samples"""
    reduce_token_ids: bool = False
    """map the trace's token ids into the model's vocabulary by modulo"""
    dtype: DtypeName | None = None
    """working precision; None: that of the plan's device"""
    attention: AttentionName | None = None
    """implementation of tree attention; None: the fastest on this device"""
    warmup: CountOrZero = 0
    """untimed runs of every phase before the timed ones"""
    repeat: Count = 1
    """timed runs of every phase, from the same weights; times are medians"""
    timeout_s: Positive = TIMEOUT_S
    """stop all ranks after this time"""
    loss: LossOptions = LossOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    router: RouterOptions = RouterOptions()

    @property
    def num_runs(self) -> int:
        """How often every phase runs."""
        return self.warmup + self.repeat

    def conflicts(self) -> Iterator[str]:
        """Options that do not go together."""
        if self.weights is not None:
            random = ("seed", "init_std", "reference_perturb")
            yield from without_effect(self, random, "--weights")
        elif self.reference_weights is not None:
            yield from without_effect(self, ("reference_perturb",), "--reference-weights")
        if self.loss.kind == "sft":
            yield from without_effect(self, ("token_advantages",), "--loss sft")

    def check(self, model: ModelSpec, phases: Collection[str]) -> None:
        """Check all values, and that they have an effect beside each other and on this plan.

        Raises:
            ConfigError: naming the flag of every mistake.
        """
        mistakes = [*_mistakes(self), *self.unfit(model, phases)]
        if mistakes:
            raise ConfigError("\n".join(mistakes), "psrl execute --help describes all flags")

    def unfit(self, model: ModelSpec, phases: Collection[str]) -> Iterator[str]:
        """Options that do not fit a plan's model and phases."""
        if not model.num_moe_experts:
            names = [field.name for field in fields(self.router)]
            beside = f"{model.name}, which has no experts"
            yield from without_effect(self.router, names, beside)
        for needed, phase, what, without in (
            (self.loss.needs_old_logprob, "log_old_prob", f"--loss {self.loss.kind}", "--loss sft"),
            (self.loss.needs_reference, "reference", "a KL penalty", "--kl-coefficient 0"),
        ):
            if needed and "update" in phases and phase not in phases:
                yield (
                    f"{what} needs phase {phase}, the plan has {sorted(phases)}: plan it too, or "
                    f"pass {without}"
                )


@dataclass(frozen=True)
class ExecuteOptions(PhaseOptions):
    """How a plan is executed, and what the execution keeps."""

    keep_gradients: bool = False
    """store the gradients, so that `psrl verify` can compare two runs"""
    checkpoint: Path | None = None
    """directory of checkpoints; the run adds one after the last optimizer step"""
    resume: bool = False
    """start from the last checkpoint there, also of another parallel layout"""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.resume and self.checkpoint is None:
            yield "--resume has no directory to resume from: add --checkpoint DIR"

    def unfit(self, model: ModelSpec, phases: Collection[str]) -> Iterator[str]:
        yield from super().unfit(model, phases)
        if self.checkpoint is not None and "update" not in phases and not self.resume:
            yield (
                f"the plan has no update phase, so there is nothing to save in {self.checkpoint}: "
                "leave out --checkpoint, or add --resume to run with the weights of a checkpoint"
            )


def changed(options: Any) -> Iterator[tuple[str, Any]]:
    """Flags and values of the options that differ from their defaults, groups included."""
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from changed(value)
        elif value != field.default:
            yield _flag(options, field.name), value


def without_effect(options: Any, names: Collection[str], beside: str) -> Iterator[str]:
    """A mistake if some of the named options are changed though nothing reads them."""
    unread = {_flag(options, name) for name in names}
    given = " and ".join(flag for flag, _ in changed(options) if flag in unread)
    if given:
        yield f"{given} would have no effect with {beside}: leave out {given}"


def _mistakes(options: Any) -> Iterator[str]:
    """What is wrong with options, groups included."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if is_dataclass(value):
            yield from _mistakes(value)
        elif wanted := _refusal(value, hint):
            yield f"{_flag(options, name)} {value} is refused: it must be {wanted}"
    if hasattr(options, "conflicts"):
        yield from options.conflicts()


def _refusal(value: Any, hint: Any) -> str:
    """What a value should have been; empty if it is allowed."""
    if value is None:
        return ""
    if get_origin(hint) is Literal:
        return "" if value in get_args(hint) else f"one of {', '.join(get_args(hint))}"
    wrong = (m.what for m in _extras(hint) if isinstance(m, Allowed) and not m.holds(value))
    deeper = (_refusal(value, inner) for inner in get_args(hint))
    return next((text for text in (*wrong, *deeper) if text), "")


def _flag(options: Any, name: str) -> str:
    """The flag of a field: its name in kebab case, or the one that its type gives it."""
    hint = get_type_hints(type(options), include_extras=True)[name]
    own = next((extra.name for extra in _extras(hint) if hasattr(extra, "name")), None)
    return "--" + (own or name.replace("_", "-"))


def _extras(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())
