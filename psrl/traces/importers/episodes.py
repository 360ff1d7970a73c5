"""Recorded text: episodes of turns become step samples."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import numpy as np

from psrl.core.errors import TraceError
from psrl.core.samples.sample import IntArray
from psrl.traces.chat_template import Turn, turns_text
from psrl.traces.recording import Recording
from psrl.traces.tokenizer import Tokenizer, load_tokenizer

from .assemble import assemble
from .options import ImportOptions
from .reading import SKIP_HINT, BadRecords, Raw, check_text, located, parse_each
from .samples import RecordedSample

CHAT_MODES = ("step", "step_rt", "step_s")


@dataclass(frozen=True)
class CallTimes:
    """Times of one model call in seconds; NaN when unknown."""

    arrival_s: float = nan
    generate_s: float = nan
    environment_s: float = nan


@dataclass(frozen=True)
class TextEpisode:
    """One recorded conversation or log.

    Attributes:
        where: place of the record, for errors.
        group: semantic group.
        reward: of the episode; NaN when unknown.
        turns: what was said; those with a response are the model's calls.
        separate: instead of `turns`, a whole conversation per call, which ends with its response.
        times: of each call, in order; empty when unknown.
        trajectory: name inside the group; empty numbers the episodes of the group.
        first_step: agent step of the first call.
        is_one_sample: the recorded sample is the whole episode, with every response trained.
        iteration: RL iteration as recorded; None when the recording does not tell.
    """

    where: str
    group: str
    reward: float
    turns: Sequence[Turn] = ()
    separate: Sequence[Sequence[Turn]] = ()
    times: Sequence[CallTimes] = ()
    trajectory: str = ""
    first_step: int = 0
    is_one_sample: bool = False
    iteration: int | None = None


def import_episodes(
    paths: list[Path],
    options: ImportOptions,
    places: Callable[[Path], Iterator[tuple[str, Raw]]],
    parse: Callable[[str, Raw], TextEpisode | list[TextEpisode]],
    notes: list[str],
    sampling_mode: str | None = "",
) -> Recording:
    """Read, tokenise and assemble episodes.

    Args:
        places: place and raw content of each episode in a file.
        parse: the episodes of a raw record.
        notes: what the format assumes.
        sampling_mode: of the recording; empty takes the options' mode, None tells by the samples.

    Raises:
        TraceError: at the first malformed record, unless `options.skip_bad`; if mode step_s finds
            no summary.
        ConfigError: if the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    mode = options.mode or "step"
    bad = BadRecords(options.skip_bad)
    seen: Counter[str] = Counter()

    def parse_all(where: str, raw: Raw) -> list[tuple[TextEpisode, list[RecordedSample]]]:
        parsed = parse(where, raw)
        episodes = parsed if isinstance(parsed, list) else [parsed]
        return [(episode, _samples(episode, tokenizer, mode, seen)) for episode in episodes]

    samples: list[RecordedSample] = []
    num_episodes = num_summaries = num_shortened = 0
    for parsed in parse_each(paths, options.limit, bad, places, parse_all):
        for episode, episode_samples in parsed:
            samples += episode_samples
            num_episodes += 1
            num_summaries += sum(turn.is_summary for turn in episode.turns)
            num_shortened += sum(turn.shortened is not None for turn in episode.turns)
    if mode == "step_s" and num_episodes and not num_summaries:
        raise TraceError(
            f"mode step_s: no message in {num_episodes} conversations is marked as a summary",
            "summaries are taken as recorded, never made up; use mode step",
        )
    notes = [f"tokenizer {tokenizer.name}", *notes]
    if mode == "step_rt":
        notes.append(f"thinking of {num_shortened} responses is left out of later prompts")
    if mode == "step_s":
        notes.append(f"{num_summaries} recorded summaries replace the history before them")
    return assemble(
        samples, None, paths, options, bad, notes, mode if sampling_mode == "" else sampling_mode
    )


def _samples(
    episode: TextEpisode, tokenizer: Tokenizer, mode: str, seen: Counter[str]
) -> list[RecordedSample]:
    """Step samples of one episode, counted in `seen` once it is known to be sound."""
    for turns in (episode.turns, *episode.separate):
        check_text(turns_text(turns), f"{episode.where}: the conversation")
    with located(episode.where):
        calls = [list(calls_of(turns, tokenizer, mode))[-1] for turns in episode.separate]
        calls += calls_of(episode.turns, tokenizer, mode)
    if not calls:
        raise TraceError(
            f"{episode.where}: no response of the model (role assistant), nothing to train",
            SKIP_HINT,
        )
    trajectory = episode.trajectory or f"{episode.group}/{seen[episode.group]}"
    seen[episode.group] += 1
    times = episode.times or [CallTimes()] * len(calls)
    spans = [((start, len(tokens)),) if 0 < start < len(tokens) else () for tokens, start in calls]
    samples = [
        RecordedSample(
            symbols=tokens,
            loss_spans=span,
            group_id=episode.group,
            trajectory_id=trajectory,
            agent_step=episode.first_step + step,
            reward=episode.reward,
            arrival_s=call.arrival_s,
            generate_s=call.generate_s,
            environment_s=call.environment_s,
            iteration=episode.iteration,
        )
        for step, ((tokens, _), span, call) in enumerate(zip(calls, spans, times, strict=True))
    ]
    if episode.is_one_sample:
        merged = tuple(span for call_spans in spans for span in call_spans)
        return [replace(samples[-1], loss_spans=merged, agent_step=episode.first_step)]
    return samples


def calls_of(
    turns: Sequence[Turn], tokenizer: Tokenizer, mode: str
) -> Iterator[tuple[IntArray, int]]:
    """Tokens of each model call, and how many of them are its prompt.

    Responses and the context between them are encoded apart, as a sampler does, so a prompt
    starts with what it repeats, token by token.
    """
    first = history = np.empty(0, np.int64)
    for position, turn in enumerate(turns):
        if turn.is_summary and mode == "step_s":
            history = first
        prompt = np.concatenate([history, tokenizer.encode(turn.before)])
        response = tokenizer.encode(turn.response)
        if turn.response:
            yield np.concatenate([prompt, response]), len(prompt)
        if turn.shortened is not None and mode == "step_rt":
            response = tokenizer.encode(turn.shortened)
        history = np.concatenate([prompt, response, tokenizer.encode(turn.after)])
        if position == 0:
            first = history
