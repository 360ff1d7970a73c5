"""Roll out synthetic episodes and cut them into the samples of a mode."""

from dataclasses import dataclass, field

import numpy as np

from psrl.core.errors import ConfigError
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch, make_batch
from psrl.traces.advantages import grpo_advantages
from psrl.traces.modes import derive
from psrl.traces.recording import Recording

from .spec import SynthSpec

# The other modes are generated call by call; these are derived from such calls.
_RECORDED = {"traj": "step", "tree": "tree_step"}


def synthesise(spec: SynthSpec, mode: str, seed: int) -> Recording:
    """Samples of one mode, every turn part one block.

    The same seed gives the same turns, lengths and rewards in every mode, and a dial changes
    only what it is about: each kind of draw has its own stream.

    Raises:
        ConfigError: if the dials contradict each other.
    """
    if spec.tasks < spec.mini_batches:
        raise ConfigError(
            f"{spec.tasks} tasks cannot fill {spec.mini_batches} mini-batches of whole tasks",
            "raise tasks or lower mini_batches",
        )
    recorded = _RECORDED.get(mode, mode)
    blocks = _Blocks()
    iterations = []
    for index in range(spec.iterations):
        draws = _draw(spec, np.random.SeedSequence([seed, index]))
        iterations.append((draws, _roll_out(spec, recorded, draws, blocks)))
    table = np.array(blocks.num_tokens, np.int64)
    batches = [_batch(spec, draws, calls, table) for draws, calls in iterations]
    return Recording(
        batches=tuple(derive(batch, mode, recorded) for batch in batches),
        source=f"psrl trace synth, {spec.name} {mode}, seed {seed}",
        licence="CC0-1.0",
        sampling_mode=mode,
        notes=f"synthetic; dials {spec.model_dump_json(exclude_defaults=True)}",
    )


@dataclass
class _Blocks:
    """Lengths of the blocks made so far; a block is named by its position."""

    num_tokens: list[int] = field(default_factory=list)

    def new(self, num_tokens: int) -> list[int]:
        """A fresh block, or none if it would be empty."""
        if num_tokens < 1:
            return []
        self.num_tokens.append(num_tokens)
        return [len(self.num_tokens) - 1]

    def total(self, blocks: list[int]) -> int:
        return sum(self.num_tokens[b] for b in blocks)


@dataclass(frozen=True)
class _Draws:
    """Everything random in an iteration (T tasks, R rollouts of all tasks, K turns of all).

    Attributes:
        prompt: [T] tokens.
        first_turn: [R + 1] rows of the turn arrays per rollout.
        think, action, observation, summary: [K] tokens.
        rewrites: [K] whether the turn begins by rewriting the history.
        fork: [R, 2] uniform draws: which rollout to leave, and where.
        reward: [R] 0 or 1.
    """

    prompt: IntArray
    first_turn: IntArray
    think: IntArray
    action: IntArray
    observation: IntArray
    summary: IntArray
    rewrites: IntArray
    fork: FloatArray
    reward: FloatArray


def _draw(spec: SynthSpec, seed: np.random.SeedSequence) -> _Draws:
    streams = [np.random.default_rng(child) for child in seed.spawn(9)]
    num_rollouts = spec.tasks * spec.rollouts
    turns = np.maximum(1, spec.turns.values(_stratified(streams[0], num_rollouts)))
    first_turn = np.concatenate([[0], np.cumsum(turns)]).astype(np.int64)
    num_turns = int(first_turn[-1])
    return _Draws(
        prompt=spec.prompt.values(_stratified(streams[1], spec.tasks)),
        first_turn=first_turn,
        think=spec.think.values(streams[2].random(num_turns)),
        action=np.maximum(1, spec.action.values(streams[3].random(num_turns))),
        observation=spec.observation.values(streams[4].random(num_turns)),
        summary=spec.summary.values(streams[5].random(num_turns)),
        rewrites=(_stratified(streams[6], num_turns) < spec.rewrite_rate).astype(np.int64),
        fork=np.stack([_stratified(streams[7], num_rollouts) for _ in range(2)], axis=1),
        reward=(streams[8].random(num_rollouts) < spec.success_rate).astype(np.float64),
    )


def _stratified(rng: np.random.Generator, count: int) -> FloatArray:
    """[count] uniform draws, one from each of `count` equal parts of [0, 1], shuffled.

    For what decides the match rate and is drawn few times per batch (turns, prompts, forks,
    rewrites): drawn like this, every batch holds the whole distribution.
    """
    draws: FloatArray = (rng.permutation(count) + rng.random(count)) / count
    return draws


@dataclass(frozen=True)
class _Call:
    """One model call: its blocks, the tokens of its prompt and of all, and whose it is."""

    blocks: list[int]
    prompt_tokens: int
    num_tokens: int
    task: int
    rollout: int
    agent_step: int


def _roll_out(spec: SynthSpec, mode: str, draws: _Draws, blocks: _Blocks) -> list[_Call]:
    instructions = blocks.new(spec.instructions_tokens)
    calls: list[_Call] = []
    for task, prompt_tokens in enumerate(draws.prompt.tolist()):
        head = instructions + blocks.new(prompt_tokens)
        # Histories before each turn of the task's rollouts so far: where a branch may leave.
        before: list[list[list[int]]] = []
        for rollout in range(task * spec.rollouts, (task + 1) * spec.rollouts):
            histories: list[list[int]] = []
            history: list[int] = []
            if mode == "tree_step" and before:
                histories, history = _fork(spec, draws, rollout, before)
            first_row, end_row = draws.first_turn[rollout : rollout + 2].tolist()
            first_step = len(histories)
            for step in range(first_step, max(first_step + 1, end_row - first_row)):
                row = min(first_row + step, end_row - 1)
                so_far = history
                if history and draws.rewrites[row]:
                    history = blocks.new(round(spec.rewrite_keep * blocks.total(history)))
                prompt = head + history
                num_prompt_tokens = blocks.total(prompt)
                if step > first_step and num_prompt_tokens > spec.max_prompt_tokens:
                    break
                histories.append(so_far)
                response, history = _turn(draws, row, mode, history, blocks)
                num_tokens = num_prompt_tokens + blocks.total(response)
                calls.append(
                    _Call(prompt + response, num_prompt_tokens, num_tokens, task, rollout, step)
                )
            before.append(histories)
    return calls


def _fork(
    spec: SynthSpec, draws: _Draws, rollout: int, before: list[list[list[int]]]
) -> tuple[list[list[int]], list[int]]:
    """Histories before the turns that a branch has in common with another rollout, and its own.

    `branches` rollouts in a row leave at the same point.
    """
    bundle = (len(before) - 1) // spec.branches * spec.branches
    which, where = draws.fork[rollout - len(before) + 1 + bundle].tolist()
    left = before[int(which * (1 + bundle))]
    step = int(where * (spec.fork_depth * (len(left) - 1) + 1))
    return left[:step], left[step]


def _turn(
    draws: _Draws, row: int, mode: str, history: list[int], blocks: _Blocks
) -> tuple[list[int], list[int]]:
    """Blocks of the response, and the history before the next turn."""
    thought, acted = blocks.new(int(draws.think[row])), blocks.new(int(draws.action[row]))
    if mode == "step_s":
        summary = blocks.new(int(draws.summary[row]))
        seen = blocks.new(int(draws.observation[row]))
        return thought + acted + summary, summary + seen
    kept = acted if mode == "step_rt" else thought + acted
    seen = blocks.new(int(draws.observation[row]))
    return thought + acted, history + kept + seen


def _batch(spec: SynthSpec, draws: _Draws, calls: list[_Call], table: IntArray) -> SampleBatch:
    tasks = np.repeat(np.arange(spec.tasks), spec.rollouts)
    advantage = grpo_advantages(tasks.astype(np.str_), draws.reward)
    rollout = np.array([call.rollout for call in calls])
    return make_batch(
        [call.blocks for call in calls],
        [[(call.prompt_tokens, call.num_tokens)] for call in calls],
        symbol_num_tokens=table,
        group_id=[f"task{call.task}" for call in calls],
        trajectory_id=[f"rollout{call.rollout % spec.rollouts}" for call in calls],
        agent_step=[call.agent_step for call in calls],
        mini_batch=[call.task % spec.mini_batches for call in calls],
        advantage=advantage[rollout],
        reward=draws.reward[rollout],
    )
