"""Random step batches: episodes that grow, restart and are shared, over very few tokens."""

import numpy as np
from hypothesis import strategies as st

from psrl.core.samples.sample import SampleBatch, make_batch


@st.composite
def step_batches(draw: st.DrawFn) -> SampleBatch:
    """Up to 3 groups of up to 3 trajectories of up to 4 calls, in a shuffled order."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    rows = []
    for group in range(draw(st.integers(1, 3))):
        for trajectory in range(draw(st.integers(1, 3))):
            history = draw(tokens)
            for step in range(draw(st.integers(1, 4))):
                if draw(st.integers(0, 4)) == 0:
                    history = draw(tokens)
                sample = history + draw(tokens)
                rows.append((f"g{group}", f"t{trajectory}", step, sample, len(history)))
                history = sample + draw(st.lists(st.integers(0, 2), max_size=2))
    rows = draw(st.permutations(rows))
    lengths = draw(st.none() | st.lists(st.integers(1, 5), min_size=3, max_size=3))
    table = None if lengths is None else np.array(lengths)
    size = [1, 1, 1] if lengths is None else lengths
    spans = [
        [(sum(size[x] for x in sample[:start]), sum(size[x] for x in sample))]
        for _, _, _, sample, start in rows
    ]
    count = len(rows)
    return make_batch(
        [row[3] for row in rows],
        spans,
        symbol_num_tokens=table,
        group_id=[row[0] for row in rows],
        trajectory_id=[row[1] for row in rows],
        agent_step=[row[2] for row in rows],
        advantage=draw(st.lists(st.sampled_from([0.0, 1.5]), min_size=count, max_size=count)),
        mini_batch=draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)),
        generate_s=np.arange(count, dtype=float),
    )
